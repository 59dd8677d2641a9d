"""Runs three optimizer steps on one layout; each rank writes its parameters and gradient norms.

torchrun --nproc-per-node N -m tests.dist.checkpoint.optimizer_worker OUT_DIR DP TP PP VPP \
    OPTIMIZER FROZEN VARIANT [SPLIT]

OPTIMIZER is adam, distributed (Adam) or muon.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megapack import Layout, build_dp_schedule, launch
from megapack.cost import LayerSplit
from megapack.job.config.sections import OptimConfig
from megapack.job.gpt.optimizer import build_optimizer
from megapack.model.parameters import global_parameters
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.setup import build_chunks

NUM_STEPS = 3
CLIP = 0.05
# Whole matrices on every layout, and products that do not round to bf16 on a CPU that can.
MUON: dict[str, Any] = {
    "name": "muon",
    "muon_tp_mode": "duplicated",
    "muon_fp32_matmul_prec": "highest",
    "lr": 1e-2,
}
# All parameters of the first of two stages.
FROZEN = ("embedding.*", "decoder.layers.[0-3].*")


def main(
    out_dir: str,
    dp: int,
    tp: int,
    pp: int,
    vpp: int,
    name: str,
    frozen: bool,
    variant: str,
    text: str | None = None,
) -> None:
    """Train and write `OUT_DIR/rank<r>.pt`."""
    launch.start("cpu")
    # Multi-latent attention needs sequence parallelism.
    layout = Layout(dp=dp, tp=tp, pp=pp, vpp=vpp, sequence_parallel=tp > 1 and variant == "mla")
    model = problem.MODELS[variant][0]
    model = dataclasses.replace(model, freeze=FROZEN if frozen else ())
    split = LayerSplit(pipeline_model_parallel_layout=text)
    distributed = name == "distributed"
    chunks = build_chunks(layout, model=model, split=split, distributed_optimizer=distributed)
    # Adam divides by the gradient's size: without a large eps, rounding errors of tiny gradients
    # would become large.
    optim = OptimConfig(lr=1e-1, clip_grad=CLIP, adam_eps=1e-3, distributed_optimizer=distributed)
    if name == "muon":
        optim = dataclasses.replace(optim, **MUON)
    optimizer = build_optimizer(optim, chunks, bf16=False)
    adapter = ScheduleAdapter(chunks, layout=layout)
    batch = problem.make_batch()
    plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=64)
    norms = []
    for _ in range(NUM_STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        adapter.step(plan, batch, objective=problem.OBJECTIVE)
        updated, norm, _ = optimizer.step()
        assert updated
        norms.append(float(norm))
    # The partitions are written too, so that the test can slice a whole parameter like these.
    parameters = {n: p for c in chunks for n, p in global_parameters(c)}
    inner = getattr(optimizer, "chained_optimizers", [])
    groups = [g for one in inner if not one.is_stub_optimizer for g in one.optimizer.param_groups]
    in_muon = {id(p) for group in groups if "momentum" in group for p in group["params"]}
    result = {
        "norms": norms,
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "in_muon": [n for n, p in parameters.items() if id(p) in in_muon],
        "trained": [n for n, p in parameters.items() if p.requires_grad],
        "parameters": {n: p.detach().clone() for n, p in parameters.items()},
        "partitions": {n: _partition(p) for n, p in parameters.items()},
    }
    torch.save(result, Path(out_dir) / f"rank{dist.get_rank()}.pt")
    launch.stop()


def _partition(param: torch.Tensor) -> tuple[int, int] | None:
    if not getattr(param, "tensor_model_parallel", False):
        return None
    return param.partition_dim, param.partition_stride


if __name__ == "__main__":
    main(
        sys.argv[1],
        *(int(v) for v in sys.argv[2:6]),
        sys.argv[6],
        sys.argv[7] == "True",
        *sys.argv[8:],
    )
