"""A small plan whose micro-batches lie over four, two and one DP ranks, made by hand."""

from __future__ import annotations

from megapack.layout import Layout, block_ranks
from megapack.plan import MicroBatch, Plan, StepPlan
from megapack.policy import Policy
from tests.made_rows import made_row

LAYOUT = Layout(dp=4, pp=2, vpp=2)
BUDGET = 3000
LENGTHS = [9000, 4001, *range(700, 1070, 37)]
"""Sample 0 needs four ranks, sample 1 two; the other ten need one."""
TOKENS = sum(LENGTHS)
WIDE_TOKENS = 9000 + 4001


def wide_row(*samples: int, first: int = 0, width: int = 1) -> MicroBatch:
    """A row of these samples over `width` ranks from rank `first` on."""
    return made_row(samples, LENGTHS, LAYOUT, block_ranks(first, width))


def wide_plan() -> Plan:
    """Sample 0 over the ranks 0-3, sample 1 over the ranks 2-3, each other sample in its row.

    The grid of show:

            rank 0      rank 1      rank 2      rank 3
     0  1:9000@0-3  1:9000@0-3  1:9000@0-3  1:9000@0-3
     1       1:700       1:811  1:4004@2-3  1:4004@2-3
     2       1:737       1:848       1:922       1:996
     3       1:774       1:885       1:959      1:1033
    """
    four = wide_row(0, width=4)
    two = wide_row(1, first=2, width=2)
    others = [wide_row(i) for i in range(2, 12)]
    ranks = (
        (four, *others[:3]),
        (four, *others[3:6]),
        (four, two, *others[6:8]),
        (four, two, *others[8:]),
    )
    step = StepPlan(ranks, 4, 2, tuple(range(12)), ())
    return Plan(
        steps=(step,),
        layout=LAYOUT,
        policy=Policy(context_parallel="dynamic"),
        max_tokens_per_gpu=BUDGET,
        micro_batch_size=None,
        num_samples=12,
        rollout_ids=None,
    )
