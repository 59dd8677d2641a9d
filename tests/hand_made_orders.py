"""A small plan with a sample in pieces and with split backwards, made by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from megapack.layout import Layout
from megapack.plan import MicroBatch, Plan, StepPlan
from megapack.plan.order import Operation, StepOrder, chain_order
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
    return made_row(samples, LENGTHS, LAYOUT, pieces={samples[0]: piece})


def weights_later(order: StepOrder, lag: int) -> tuple[str, ...]:
    """The order with split backwards: weight gradients run `lag` backwards later."""
    lines = []
    for stage in range(order.pp):
        line: list[Operation] = []
        waiting: deque[Operation] = deque()
        for op in order.operations(stage):
            line.append(op)
            if op.kind == "B":
                waiting.append(op._replace(kind="W"))
            if len(waiting) > lag:
                line.append(waiting.popleft())
        lines.append(" ".join(map(str, [*line, *waiting])))
    return tuple(lines)


def with_weights_later(plan: Plan, lag: int) -> Plan:
    """The plan with split backwards, see `weights_later`; later by one on each further rank."""
    (step,) = plan.steps
    ranks = range(plan.layout.dp)
    orders = tuple(weights_later(step.order(rank, plan.layout), lag + rank) for rank in ranks)
    policy = replace(plan.policy, backward="split", max_live_tokens_per_gpu=1 << 20)
    return replace(plan, policy=policy, steps=(replace(step, orders=orders),))


def split_orders(num_microbatches: int, chains: list[range]) -> tuple[str, ...]:
    """The order of one rank: each weight gradient two operations after its backward."""
    return weights_later(chain_order(LAYOUT.pp, 1, num_microbatches, 1, chains), 1)


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


def joined_chains(chains: Iterable[range]) -> list[range]:
    """Ranges that have a micro-batch in common as one range, in order.

    With those of all DP ranks `chain_order` gives ranks that must run one order theirs: where the
    backwards of a range run in reverse, those of each chain in it do.

    >>> joined_chains([range(4, 6), range(0, 2), range(1, 4)])
    [range(0, 4), range(4, 6)]
    """
    joined: list[range] = []
    for chain in sorted(chains, key=lambda chain: chain.start):
        if joined and chain.start < joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, chain.stop))
        else:
            joined.append(chain)
    return joined
