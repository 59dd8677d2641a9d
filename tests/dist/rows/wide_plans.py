"""Plans of any samples, with rows that DP ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megapack.layout import block_ranks
from megapack.plan.plan import Plan, StepPlan
from tests.made_rows import made_row


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
                row = made_row(samples, lengths, plan.layout, block)
                for rank in block:
                    ranks[rank][place] = row
        return replace(step, ranks=tuple(map(tuple, ranks)))

    return replace(plan, steps=tuple(map(shared, plan.steps)))
