"""Runs steps of different M with DDP's overlap; each rank writes gradients and parameters.

torchrun --nproc-per-node N -m tests.dist.schedule.overlap_worker OUT_DIR CASE
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import Layout, Policy, build_dp_schedule, launch
from megapack.job.config.sections import OptimConfig
from megapack.job.gpt.optimizer import build_optimizer
from megapack.job.train.passes import Reference
from megapack.model.overlap import finish_param_gathers
from megapack.model.parameters import global_parameters
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.setup import build_chunks

REDUCE = {"overlap_grad_reduce": True, "bucket_size": 5000}
GATHER = {**REDUCE, "overlap_param_gather": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout and DDP's settings."""

    layout: Layout
    ddp: dict[str, Any] = field(default_factory=dict)
    distributed: bool = False
    variant: str = "plain"
    policy: Policy = field(default_factory=Policy)


PP2_VPP2 = Layout(dp=2, pp=2, vpp=2)
CASES = {
    "single": Case(layout=Layout()),
    "dp2": Case(layout=Layout(dp=2), ddp=REDUCE),
    "dp2_pp2": Case(layout=Layout(dp=2, pp=2), ddp=REDUCE),
    "dp2_pp2_vpp2": Case(layout=PP2_VPP2, ddp=REDUCE),
    "sharded_dp2": Case(layout=Layout(dp=2), ddp=GATHER, distributed=True),
    "sharded_dp2_pp2": Case(layout=Layout(dp=2, pp=2), ddp=GATHER, distributed=True),
    "sharded_dp2_pp2_vpp2_aligned": Case(
        layout=PP2_VPP2, ddp={**GATHER, "align_param_gather": True}, distributed=True
    ),
    # Untied: the head's weight has a gradient of its own.
    "dp2_pp2_untied": Case(layout=Layout(dp=2, pp=2), ddp=REDUCE, variant="other"),
    "sharded_dp2_pp2_mtp": Case(
        layout=Layout(dp=2, pp=2), ddp=GATHER, distributed=True, variant="mtp_other"
    ),
    "other_single": Case(layout=Layout(), variant="other"),
    "mtp_other_single": Case(layout=Layout(), variant="mtp_other"),
    "moe_single": Case(layout=Layout(), variant="moe"),
    "moe_dp2_ep2": Case(layout=Layout(dp=2, ep=2), ddp=REDUCE, variant="moe"),
}

# The number of samples of each step. In rows of 64 tokens, M of the second step is larger than that
# of the first, and M of the third is smaller.
STEPS = (10, 16, 2)


def main(out_dir: str, name: str) -> None:
    """Train and write `OUT_DIR/rank<r>.pt`."""
    launch.start("cpu")
    case = CASES[name]
    chunks = build_chunks(
        case.layout,
        model=problem.shallow(problem.MODELS[case.variant][0]),
        distributed_optimizer=case.distributed,
        reduction=case.ddp,
    )
    # A large eps, as in optimizer_worker: Adam divides by the gradient's size.
    optim = OptimConfig(lr=1e-2, clip_grad=0, adam_eps=1e-2, distributed_optimizer=case.distributed)
    optimizer = build_optimizer(optim, chunks, bf16=False)
    adapter = ScheduleAdapter(chunks, layout=case.layout)
    reference = Reference(chunks)
    steps = [_step(case, adapter, optimizer, reference, n) for n in STEPS]
    finish_param_gathers(chunks)
    result = {"steps": steps, "weights": _parameters(chunks)}
    torch.save(result, Path(out_dir) / f"rank{dist.get_rank()}.pt")
    launch.stop()


def _step(
    case: Case,
    adapter: ScheduleAdapter,
    optimizer: Any,
    reference: Reference,
    num_samples: int,
) -> dict[str, Any]:
    batch = problem.make_batch(num_samples)
    is_alone = case.layout.world_size == 1
    plan = build_dp_schedule(
        batch.lengths,
        layout=case.layout,
        max_tokens_per_gpu=None if is_alone else 64,
        micro_batch_size=1 if is_alone else None,
        cost=problem.COST,
        policy=case.policy,
    )
    # Without optimizer.zero_grad(): Megatron's fp32 optimizer leaves param.grad = param.main_grad.
    with contextlib.ExitStack() as left_open:
        for chunk in adapter.chunks:
            chunk.zero_grad_buffer()
            left_open.enter_context(chunk.no_sync())
        result = adapter.step(plan, batch, objective=problem.OBJECTIVE)
    # The forward has gathered the parameters of the last optimizer step.
    before = _parameters(adapter.chunks)
    gradients = {n: p.main_grad.clone() for c in adapter.chunks for n, p in global_parameters(c)}
    # Gathers the old parameters under overlap_param_gather; the next forward must gather the new.
    adapter.forward(plan, batch)
    optimizer.step()
    # The weights that come back must be those of the optimizer, not those before the gather.
    with reference.weights():
        adapter.forward(plan, batch)
    counts = [len(rank) for rank in plan.steps[0].ranks]
    return {"loss": result.loss, "counts": counts, "weights": before, "gradients": gradients}


def _parameters(chunks: list[Any]) -> dict[str, Tensor]:
    return {n: p.detach().clone() for c in chunks for n, p in global_parameters(c)}


if __name__ == "__main__":
    main(*sys.argv[1:])
