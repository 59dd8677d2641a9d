"""Runs cases of `tools.nccl.problem` on all ranks and compares each with the reference.

python -m tools.nccl.on_ranks.exact REFERENCE OUT CASE ...
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import launch
from megapack.job.config.sections import OptimConfig
from megapack.job.gpt import initialize_parallel
from megapack.job.gpt.optimizer import build_optimizer
from megapack.schedule import ScheduleAdapter
from tests.dist.groups import end_model_parallel
from tests.dist.problem import SEED
from tests.gpu.compare import Samples, build_adapter, exactness, one_sample_outputs
from tools.nccl import problem
from tools.nccl.on_ranks.progress import note, write
from tools.nccl.on_ranks.reference import ADAM_EPS, LEARNING_RATE, UPDATED
from tools.nccl.problem import FEATURES, Case

_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 100_000}


def run_case(case: Case, reference: dict[str, Samples], sums: dist.ProcessGroup) -> dict[str, Any]:
    """Errors of a forward and a step, and with overlap of a forward after the update.

    Args:
        sums: a group over gloo, for the errors of all ranks.
    """
    feature = FEATURES[case.feature]
    options: dict[str, Any] = {"splits_backward": feature.splits_backward}
    if feature.overlaps:
        options["distributed_optimizer"] = True
        options["reduction"] = _OVERLAP
    adapter = build_adapter(case.settings, case.layout, ScheduleAdapter, **options)
    plan, batch = feature.plan(case.layout), case.batch()
    exact = reference[f"{case.samples} fp32"]
    own = reference[f"{case.samples} bf16"] if case.dtype == "bf16" else None
    found = exactness(
        *(adapter, exact, own),
        plan=plan,
        batch=batch,
        has_gradients=not feature.overlaps,
        sums=sums,
    )
    step = plan.steps[0]
    found["rows_over_ranks"] = sum(row.width > 1 for row in step.microbatches)
    found["pieces"] = sum(len(row.pieces) for row in step.microbatches)
    found["own_orders"] = sum("W" in line for rank in step.orders for line in rank)
    if not feature.overlaps:
        return found
    update(adapter.chunks, case.dtype)
    after = adapter.forward(plan, batch, entropy=True)["logprobs"]
    found["updated_logprob_error"] = _worst(after, reference[f"{UPDATED} fp32"], batch)
    moved = one_sample_outputs(reference[f"{UPDATED} fp32"], batch)["logprobs"]
    found["moved_logprobs"] = _worst(moved, exact, batch)
    if own is not None:
        alone_after = one_sample_outputs(reference[f"{UPDATED} bf16"], batch)["logprobs"]
        found["one_sample_updated_logprob_error"] = _worst(
            alone_after, reference[f"{UPDATED} fp32"], batch
        )
    return found


def update(chunks: list[Any], dtype: str) -> None:
    """A step of Megatron's optimizer."""
    optim = OptimConfig(
        lr=LEARNING_RATE, adam_eps=ADAM_EPS, clip_grad=0, weight_decay=0, distributed_optimizer=True
    )
    build_optimizer(optim, chunks, bf16=dtype == "bf16").step()


def _worst(outputs: list[Tensor | None], samples: Samples, batch: Any) -> float:
    """The largest difference of a response token's log-prob."""
    largest = 0.0
    for i, sample in enumerate(samples):
        value, mask = outputs[i], batch.response_mask(i)[1:].bool()
        assert value is not None
        difference = (value[1:].cpu() - sample["logprobs"].cpu())[mask].abs()
        largest = max(largest, float(difference.max()) if difference.numel() else 0.0)
    return largest


def main(reference: str, out: str, *names: str) -> None:
    """Run the named cases; rank 0 writes `out` after each."""
    launch.start("cuda")
    samples = torch.load(reference, map_location="cpu")
    sums = dist.new_group(backend="gloo")
    known = {case.name: case for case in problem.cases(dist.get_world_size())}
    found: dict[str, Any] = {}
    for name in names:
        begin = time.monotonic()
        note(name)
        initialize_parallel(known[name].layout, SEED)
        found[name] = run_case(known[name], samples, sums)
        end_model_parallel()
        found[name]["seconds"] = round(time.monotonic() - begin, 2)
        write(out, found)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
