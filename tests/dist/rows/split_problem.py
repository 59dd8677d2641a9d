"""The problem of the cases with samples in pieces: samples, plans made by hand, and what they hold.

A plan made by hand certainly has the chains that a case is about; the planner might choose others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megapack.dp_schedule import build_dp_schedule
from megapack.layout import Layout
from megapack.plan import MicroBatch, Part, Plan, check_plan
from megapack.plan.order import chain_order
from megapack.policy import Policy
from megapack.prefixes import PrefixTable, SharedPrefixes
from tests.dist.rows.row_problem import Family, RowCase, Samples
from tests.made_rows import made_row

SHAPES: dict[str, list[Family]] = {
    # 11 samples of 97, 12, 40, 64, 7, 21, 1, 18, 33, 9 and 15 tokens. Sample 0 has a long prompt,
    # so that its first piece has no loss.
    "split": [
        *[(44, [53]), (3, [9]), (10, [30]), (5, [59]), (3, [4]), (20, [1]), (1, [0])],
        *[(8, [10]), (11, [22]), (4, [5]), (6, [9])],
    ],
}

SHAPES["shared"] = [
    *[(44, [53]), (12, [4, 6, 3]), (5, [59]), (12, [2, 4])],
    *[(20, [1]), (1, [0]), (8, [10]), (11, [22])],
]
"""Samples of 97, 16, 18, 15, 64, 14, 16, 21, 1, 18 and 33 tokens. Samples 1 to 3 are a family, and
so are 5 and 6."""

Row = tuple[Sequence[int], tuple[int, int] | None]
"""Samples of a row, and the piece of the first."""

ROWS: list[Row] = [
    ((0,), (0, 32)),
    ((0,), (32, 64)),
    ((0, 1), (64, 97)),
    ((2, 6), None),
    ((3, 4), (0, 40)),
    ((3, 5), (40, 64)),
    ((7, 8), None),
    ((9, 10), None),
]
"""Rows of one DP rank: a chain of three, with another sample in the last row, and a chain of two,
each of whose rows has one more sample. With vpp2 and G=4 each chain is in one group."""
ROWS_2: list[list[Row]] = [
    [*ROWS[:4]],
    [((7, 8), None), ((3, 4), (0, 40)), ((3, 5), (40, 64)), ((9, 10), None)],
]
"""The same samples over two DP ranks."""
SHARED_ROWS: list[Row] = [
    ((0,), (0, 32)),
    ((0,), (32, 64)),
    ((0, 1, 2), (64, 97)),
    ((3, 7), None),
    ((4, 5, 6), (0, 40)),
    ((4,), (40, 64)),
    ((8, 9), None),
    ((10,), None),
]
"""Rows of the shape `shared`: a piece stands beside a family in two of them."""

CAPACITY = 64
"""Padded tokens that a row may hold; the longest sample has 97."""
LIVE_TOKENS = 400
"""Row tokens that a stage may hold at once. A chain is held whole, also without a pipeline."""
PLAIN_CAPACITY = 128
"""The same for plans without pieces."""


@dataclass(frozen=True, kw_only=True)
class SplitCase(RowCase):
    """A case whose plan has samples in pieces."""

    shape: str = "split"
    kinds: tuple[str, ...] = ("sft", "grpo", "gspo")
    mutation: str = ""
    """What the case does wrong, see `split_worker`."""

    shapes = SHAPES
    shape_of_pairs = "split"

    def plans(self, samples: Samples) -> tuple[Plan, Plan]:
        plain = build_dp_schedule(
            samples.batch.lengths,
            layout=self.layout,
            max_tokens_per_gpu=PLAIN_CAPACITY // self.layout.cp,
        )
        return plan_by_hand(samples, plain), plain

    def facts(self, samples: Samples, plan: Plan) -> dict[str, Any]:
        return split_facts(plan)


def plan_by_hand(samples: Samples, plain: Plan) -> Plan:
    """The plan of `ROWS` or `ROWS_2`, for the layout and the samples of a plain plan."""
    layout = plain.layout
    lengths = samples.batch.lengths
    rows = [ROWS] if layout.dp == 1 else ROWS_2
    prefixes = table = None
    if samples.shape == "shared":
        rows = [SHARED_ROWS]
        tokens = [samples.batch.tokens(i) for i in range(len(samples.batch))]
        prefixes = SharedPrefixes.from_samples(tokens).without(np.array([0, 4]))
        table = PrefixTable(prefixes, len(tokens), layout)
    ranks = tuple(tuple(_row(row, lengths, layout, table) for row in rank) for rank in rows)
    count = len(ranks[0])
    group = layout.group_size if layout.vpp > 1 else None
    step = replace(plain.steps[0], ranks=ranks, num_microbatches=count, group_size=group)
    make = functools.partial(chain_order, layout.pp, layout.vpp, count, group or 1)
    orders = tuple(make(step.chains(rank)).lines() for rank in range(layout.dp))
    plan = replace(
        plain,
        steps=(replace(step, orders=orders),),
        policy=Policy(split_samples="auto", max_live_tokens_per_gpu=LIVE_TOKENS // layout.cp),
        max_tokens_per_gpu=CAPACITY // layout.cp,
        prefixes=prefixes,
    )
    check_plan(plan, lengths)
    return plan


def _row(row: Row, lengths: Sequence[int], layout: Layout, table: PrefixTable | None) -> MicroBatch:
    samples, piece = row
    if piece is None:
        return made_row(samples, lengths, layout, table=table)
    start, end = piece
    held = list(lengths)
    held[samples[0]] = end - start
    made = made_row(samples, held, layout, table=table)
    # The piece attends to the tokens before it too: (start + n)^2 - start^2.
    before_sq = 2 * start * layout.aligned_sample_tokens(end - start)
    part = Part(samples[0], start, end)
    return replace(made, pieces=(part,), tokens_sq=made.tokens_sq + before_sq)


def split_facts(plan: Plan) -> dict[str, Any]:
    """Chains of the plan, and the most row tokens that a stage holds at a time."""
    step = plan.steps[0]
    layout = plan.layout
    peak = 0.0
    for rank, rows in enumerate(step.ranks):
        amounts = np.array([float(mb.row_tokens) for mb in rows])
        peak = max(peak, float(step.order(rank, layout).peak_live(amounts).max()))
    return {
        "chains": [[len(chain) for chain in step.chains(rank)] for rank in range(layout.dp)],
        "pieces": step.counts.num_pieces,
        "longest_row": max(mb.row_tokens for mb in step.microbatches),
        "peak_live_tokens": peak,
    }
