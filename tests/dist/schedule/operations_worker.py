"""Runs cases under both executors on one model; rank 0 writes how many bits differ.

torchrun --nproc-per-node 2 -m tests.dist.schedule.operations_worker OUT CASE ...
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config
from torch import Tensor

from megapack import build_dp_schedule, launch
from megapack.base.choices import Executor
from megapack.model.parameters import global_parameters
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.exactness.cases import ALL_CASES, Case
from tests.dist.groups import end_model_parallel
from tests.dist.schedule.overlap_worker import CASES as OVERLAP_CASES
from tests.dist.schedule.overlap_worker import STEPS
from tests.dist.schedule.overlap_worker import Case as OverlapCase
from tests.dist.setup import build_chunks

OVERLAP = "overlap_"
"""Before the name of a case of `overlap_worker`."""
EXECUTORS: tuple[Executor, ...] = ("megatron", "operations")


def run_case(case: Case) -> dict[str, Any]:
    """Run a forward pass and a step of a case under each executor; returns what differs.

    Returns:
        The number of values of each kind that differ in some bit, over all ranks, and of those that
        were compared.
    """
    chunks = build_chunks(case.layout, model=case.model, split=case.split)
    for name, value in case.config.items():
        setattr(get_model_config(chunks[0]), name, value)
    buffers = {n: b.clone() for n, b in _buffers(chunks).items()}
    found = []
    for executor in EXECUTORS:
        for name, buffer in _buffers(chunks).items():
            buffer.copy_(buffers[name])
        for chunk in chunks:
            chunk.zero_grad_buffer()
        adapter = ScheduleAdapter(
            chunks,
            layout=case.layout,
            logprob_chunk_tokens=16,
            temperature=problem.MODELS[case.variant][1],
            executor=executor,
        )
        found.append(_values(adapter, case))
    return differences(*found)


def run_overlap(case: OverlapCase) -> dict[str, Any]:
    """Run steps of different M under each executor, with DDP's overlap; returns what differs."""
    found: list[dict[str, Tensor]] = []
    for executor in EXECUTORS:
        # New chunks: DDP learns in the first step which gradients it waits for.
        chunks = build_chunks(
            case.layout,
            model=problem.shallow(problem.MODELS[case.variant][0]),
            distributed_optimizer=case.distributed,
            reduction=case.ddp,
        )
        adapter = ScheduleAdapter(chunks, layout=case.layout, executor=executor)
        found.append({})
        for step, num_samples in enumerate(STEPS):
            batch = problem.make_batch(num_samples)
            plan = build_dp_schedule(batch.lengths, layout=case.layout, max_tokens_per_gpu=64)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            adapter.step(plan, batch, objective=problem.OBJECTIVE)
            gradients = _gradients(chunks)
            found[-1] |= {f"gradient {step} {name}": grad for name, grad in gradients.items()}
        end_model_parallel()
    return differences(*found)


def _values(adapter: ScheduleAdapter, case: Case) -> dict[str, Tensor]:
    """Outputs, loss, metrics, gradients and the experts' state after a forward pass and a step."""
    batch = problem.make_batch(case.num_samples)
    is_replay = case.variant == "moe_replay"
    routing = problem.choices(case.model.num_layers) if is_replay else None
    outputs = adapter.forward(case.forward_plan(), batch, entropy=True, routing=routing)
    result = adapter.step(
        case.plan(),
        batch,
        objective=problem.OBJECTIVE,
        weighting=case.weighting,
        norm_constant=case.norm_constant,
        routing=routing,
    )
    values = {
        f"output {name} {i}": value
        for name, own in outputs.items()
        for i, value in enumerate(own)
        if value is not None
    }
    sums = {"loss": result.loss, **result.metrics}
    values |= {f"metric {n}": torch.tensor(v, dtype=torch.float64) for n, v in sums.items()}
    for chunk in adapter.chunks:
        for name, param in global_parameters(chunk):
            if param.requires_grad:
                values[f"gradient {name}"] = param.main_grad.clone()
    values |= {
        f"buffer {name}": buffer.clone() for name, buffer in _buffers(adapter.chunks).items()
    }
    return values


def _gradients(chunks: list[Any]) -> dict[str, Tensor]:
    return {
        name: param.main_grad.clone()
        for chunk in chunks
        for name, param in global_parameters(chunk)
        if param.requires_grad
    }


def _buffers(chunks: list[Any]) -> dict[str, Tensor]:
    return {f"{i} {n}": b for i, c in enumerate(chunks) for n, b in c.module.named_buffers()}


def differences(one: dict[str, Tensor], two: dict[str, Tensor]) -> dict[str, Any]:
    """Count the tensors of all ranks that differ in some bit, and name those of this rank."""
    assert one.keys() == two.keys()
    differ = [name for name, value in one.items() if not torch.equal(value, two[name])]
    every: list[Any] = [None] * dist.get_world_size()
    norm = sum(float(v.double().norm()) for n, v in one.items() if n.startswith("gradient"))
    dist.all_gather_object(every, (len(one), differ, norm))
    return {
        "compared": sum(count for count, _, _ in every),
        "differ": [name for _, names, _ in every for name in names],
        "gradient_norm": sum(own for _, _, own in every),
    }


def main(out: str, names: list[str]) -> None:
    """Run the named cases; rank 0 writes `out`."""
    launch.start("cpu")
    results = {}
    for name in names:
        if name.startswith(OVERLAP):
            results[name] = run_overlap(OVERLAP_CASES[name.removeprefix(OVERLAP)])
        else:
            results[name] = run_case(ALL_CASES[name])
            end_model_parallel()
    if os.environ.get("RANK", "0") == "0":
        with open(out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    launch.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
