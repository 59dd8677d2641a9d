"""Runs two steps without zeroing gradients in between, and each of them alone.

torchrun --nproc-per-node 2 -m tests.dist.exactness.several_steps_worker OUT_DIR CASE ...
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megapack import Layout, build_dp_schedule
from megapack.loss import SFT
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.setup import build_chunks, report_cases


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, and how DDP reduces gradients."""

    layout: Layout
    variant: str = "plain"
    overlap: bool = False
    distributed: bool = False


CASES = {
    "dp2": Case(layout=Layout(dp=2)),
    "dp2 overlap": Case(layout=Layout(dp=2), overlap=True),
    "dp2 overlap, distributed": Case(layout=Layout(dp=2), overlap=True, distributed=True),
    "dp2 ep2 overlap": Case(layout=Layout(dp=2, ep=2), variant="moe", overlap=True),
    # Ranks add gradients of norms, and of the tied embedding.
    "tp2 sp": Case(layout=Layout(tp=2, sequence_parallel=True)),
    "pp2": Case(layout=Layout(pp=2)),
}

OBJECTIVES = (problem.OBJECTIVE, SFT())


def run_case(case: Case) -> dict[str, Any]:
    """Names of gradients that are not the sum of those of the steps alone."""
    reduction = {"overlap_grad_reduce": case.overlap, "bucket_size": 5000}
    chunks = build_chunks(
        case.layout,
        model=problem.shallow(problem.MODELS[case.variant][0]),
        distributed_optimizer=case.distributed,
        reduction=reduction,
    )
    adapter = ScheduleAdapter(chunks, layout=case.layout)
    batch = problem.make_batch()
    plan = build_dp_schedule(batch.lengths, layout=case.layout, max_tokens_per_gpu=64)

    def gradients(*numbers: int) -> dict[str, Tensor]:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        for number in numbers:
            adapter.step(plan, batch, objective=OBJECTIVES[number])
        return _own_gradients(chunks)

    # The first step of a DDP reduces without overlap; later ones do not.
    gradients(0)
    alone = gradients(0), gradients(1)
    both = gradients(0, 1)
    again = gradients(0, 1, 1)
    sums = {name: first + alone[1][name] for name, first in alone[0].items()}
    return {
        "num_gradients": len(sums),
        "zero": [name for name in sums if not all(each[name].any() for each in alone)],
        "different": [name for name, value in sums.items() if not value.equal(both[name])],
        "after three": [
            name for name, sum_ in sums.items() if not (sum_ + alone[1][name]).equal(again[name])
        ],
    }


def _own_gradients(chunks: list[Any]) -> dict[str, Tensor]:
    """The reduced gradients of each bucket: of a distributed optimizer this rank's part."""
    own = {}
    for number, chunk in enumerate(chunks):
        groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
        for place, group in enumerate(groups):
            for bucket in group.buckets:
                parts = [bucket.grad_data]
                if group.ddp_config.use_distributed_optimizer:
                    parts = bucket.grad_data.chunk(group.intra_distributed_optimizer_instance_size)
                rank = group.intra_distributed_optimizer_instance_rank if len(parts) > 1 else 0
                own[f"{number}.{place}.{bucket.bucket_id}"] = parts[rank].clone()
    return own


def main(out_dir: str, *names: str) -> None:
    """Run the cases and write `OUT_DIR/rank<r>.json`."""
    report_cases(out_dir, lambda name: run_case(CASES[name]), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
