"""Plans of any samples, with rows that DP ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megapack.layout import block_ranks
from megapack.plan.plan import MicroBatch, Plan, StepPlan


def with_shared_rows(plan: Plan, lengths: Sequence[int], place: int, width: int = 2) -> Plan:
    """The plan, with the rows at one place of each block of DP ranks made into one that they share.

    Args:
        plan: made with context_parallel="dynamic" and without prefixes; blocks that share a row at
            this place already, or have only padding there, stay as they are.
        place: index into each rank's micro-batches.
        width: DP ranks of a block.
    """

    def shared(step: StepPlan) -> StepPlan:
        ranks = [list(rank) for rank in step.ranks]
        for first in range(0, plan.layout.dp, width):
            block = block_ranks(first, width)
            rows = [ranks[rank][place] for rank in block]
            samples = sorted(i for row in rows for i in row.samples)
            if samples and not any(row.dp_ranks for row in rows):
                row = _row(samples, lengths, plan, block)
                for rank in block:
                    ranks[rank][place] = row
        return replace(step, ranks=tuple(map(tuple, ranks)))

    return replace(plan, steps=tuple(map(shared, plan.steps)))


def _row(
    samples: Sequence[int], lengths: Sequence[int], plan: Plan, block: tuple[int, ...]
) -> MicroBatch:
    layout = plan.layout.over(len(block))
    aligned = [layout.aligned_sample_tokens(lengths[i]) for i in samples]
    padded = layout.aligned_row_tokens(sum(aligned))
    return MicroBatch(
        samples=tuple(samples),
        row_tokens=padded,
        tokens=sum(lengths[i] for i in samples),
        tokens_sq=sum(n * n for n in aligned),
        padded_tokens=padded,
        dp_ranks=block,
    )
