"""A small plan with a sample in pieces and with split backwards, made by hand."""

from __future__ import annotations

from dataclasses import replace

from megapack.layout import Layout
from megapack.plan import MicroBatch, Part, Plan, StepPlan
from megapack.plan.order import chain_order
from megapack.policy import Policy
from tests.made_rows import made_row

LAYOUT = Layout(dp=2, pp=2)
BUDGET = 3000
LENGTHS = [7000, 500, 1200, *range(700, 1400, 100)]
"""Sample 0 is in three pieces, the last one with sample 1; the others are whole."""
TOKENS = sum(LENGTHS)
PIECES = ((0, 2800), (2800, 5200), (5200, 7000))
NUM_SPLIT_BACKWARDS = 2 * 2 * 5


def piece_row(samples: tuple[int, ...], piece: tuple[int, int]) -> MicroBatch:
    """A row that has these tokens of its first sample, and its other samples whole."""
    start, end = piece
    lengths = list(LENGTHS)
    lengths[samples[0]] = end - start
    row = made_row(samples, lengths, LAYOUT)
    before_sq = 2 * start * LAYOUT.padded_tokens([end - start])
    return replace(row, tokens_sq=row.tokens_sq + before_sq, pieces=(Part(samples[0], *piece),))


def split_orders(num_microbatches: int, chains: list[range]) -> tuple[str, ...]:
    """The order of one rank: each weight gradient two operations after its backward."""
    order = chain_order(LAYOUT.pp, 1, num_microbatches, 1, chains)
    lines = []
    for stage in range(LAYOUT.pp):
        operations: list[str] = []
        put_off: list[str] = []
        for op in order.operations(stage):
            operations.append(str(op))
            if op.kind == "B":
                put_off.append(str(op).replace("B", "W"))
            if len(put_off) == 2:
                operations.append(put_off.pop(0))
        lines.append(" ".join([*operations, *put_off]))
    return tuple(lines)


def split_plan() -> Plan:
    """Sample 0 in three micro-batches of rank 0; the backwards of both ranks are split.

    The grid of show:

                      rank 0  rank 1
         0  1:2800[0:2800]    2:1500
         1  1:2400[2800:5200] 1:900
         2  2:2300[5200:7000] 1:1000
         3        1:1200      1:1100
         4        .           2:2500
    """
    first = (
        piece_row((0,), PIECES[0]),
        piece_row((0,), PIECES[1]),
        piece_row((0, 1), PIECES[2]),
        made_row((2,), LENGTHS, LAYOUT),
        made_row((), LENGTHS, LAYOUT),
    )
    second = tuple(
        made_row(samples, LENGTHS, LAYOUT) for samples in ((3, 4), (5,), (6,), (7,), (8, 9))
    )
    orders = (split_orders(5, [range(3)]), split_orders(5, []))
    step = StepPlan((first, second), 5, None, tuple(range(10)), (), orders)
    return Plan(
        steps=(step,),
        layout=LAYOUT,
        policy=Policy(split_samples="auto", backward="split", max_live_tokens_per_gpu=9000),
        max_tokens_per_gpu=BUDGET,
        micro_batch_size=None,
        num_samples=10,
        rollout_ids=None,
    )
