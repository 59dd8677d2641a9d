"""The problem of the cases with wide rows: samples, plans made by hand, and what is in them.

A plan made by hand certainly mixes what a case is about; the planner might choose otherwise.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from megapack.dp_schedule import build_dp_schedule
from megapack.plan import Plan, check_plan
from megapack.policy import Policy
from megapack.prefixes import PrefixTable, SharedPrefixes
from tests.dist.rows.row_problem import MODELS, Family, RowCase, Samples
from tests.made_rows import Slot, made_ranks

SHAPES: dict[str, list[Family]] = {
    # 18 samples of 79, 55, 36, 20, 14, 35, 13, 25, 19, 15, 16, 7, 41, 17, 1, 33, 8 and 14 tokens.
    "wide": [
        *[(9, [70]), (30, [25, 6]), (13, [7, 1, 22, 0, 12]), (9, [(6, [4, 0]), 7])],
        *[(1, [6, 40]), (3, [14]), (1, [0]), (20, [13]), (5, [3, 9])],
    ],
    # Pairs of 74 and 54, 35 and 20, 19 and 25, 7 and 41, 12 and 14, 21 and 19, 17 and 14 tokens.
    "wide pairs": [
        *[(24, [50, 30]), (13, [22, 7]), (9, [(6, [4, 10])]), (1, [6, 40])],
        *[(8, [4, 6]), (16, [5, 3]), (5, [12, 9])],
    ],
}

SLOTS: dict[tuple[str, int], list[Slot]] = {
    ("wide", 2): [
        [(2, [0, 14])],
        [(1, [3, 4]), (1, [])],
        [(2, [5, 6, 7])],
        [(2, [1, 2])],
        [(1, [12]), (1, [8, 9, 10])],
        [(1, [11, 13]), (1, [15, 16, 17])],
    ],
    ("wide", 4): [
        [(4, [0, 14])],
        [(2, [11, 12]), (1, [3, 4]), (1, [])],
        [(1, [16, 17]), (1, []), (2, [5, 6, 7])],
        [(4, [1, 2])],
        [(2, [8, 9, 10]), (2, [15])],
        [(1, [13]), (1, []), (1, []), (1, [])],
    ],
    ("wide pairs", 2): [
        [(2, [0, 1])],
        [(1, [8, 9]), (1, [10, 11])],
        [(2, [6, 7])],
        [(2, [2, 3])],
        [(1, [12, 13]), (1, [])],
        [(1, [4, 5]), (1, [])],
    ],
    ("wide pairs", 4): [
        [(4, [0, 1])],
        [(2, [6, 7]), (1, [8, 9]), (1, [])],
        [(1, [10, 11]), (1, []), (2, [2, 3])],
        [(2, [4, 5]), (1, [12, 13]), (1, [])],
    ],
}
"""Plans made by hand, by shape and dp. Their numbers of micro-batches are even, as pp2 x vpp2 needs
them."""

CAPACITY = {2: 72, 4: 48}
"""Tokens that a row of one DP rank may hold, by dp."""
PLAIN_CAPACITY = 132
"""The same for plans without wide rows: the longest pair has 128 tokens, and 132 over cp2."""
PLANNER_CAPACITY = 24
"""The same for plans of the planner: 79 tokens need four ranks, 36 two of them."""

MIXTURES: dict[int, dict[str, int]] = {
    2: {
        **{"rows_1": 3, "rows_2": 3, "packed_wide": 2, "padding_rows": 1},
    },
    4: {
        **{"rows_1": 3, "rows_2": 3, "rows_4": 1, "packed_wide": 3, "padding_rows": 2},
        **{"mixed_slots": 2, "padding_beside": 2, "later_blocks": 1},
    },
}
"""What plans made by hand have at least, by dp, see `wide_facts`."""


@dataclass(frozen=True, kw_only=True)
class WideCase(RowCase):
    """A case whose plan has rows over several DP ranks."""

    shape: str = "wide"
    kinds: tuple[str, ...] = ("sft", "grpo", "gspo")
    shares: bool = False
    """Whether samples share prefixes."""
    is_planned: bool = False
    """Whether the planner chooses the widths."""

    shapes = SHAPES
    shape_of_pairs = "wide pairs"

    def plans(self, samples: Samples) -> tuple[Plan, Plan]:
        build = functools.partial(
            build_dp_schedule,
            samples.batch.lengths,
            layout=self.layout,
            colocate_ids=_sets(samples),
        )
        plain = build(max_tokens_per_gpu=PLAIN_CAPACITY // self.layout.cp)
        prefixes = self._prefixes(samples) if self.shares else None
        if not self.is_planned:
            return plan_by_hand(samples, plain, prefixes), plain
        plan = build(
            max_tokens_per_gpu=PLANNER_CAPACITY // self.layout.cp,
            policy=Policy(context_parallel="dynamic"),
            prefixes=prefixes,
        )
        return plan, plain

    def facts(self, samples: Samples, plan: Plan) -> dict[str, Any]:
        return wide_facts(samples, plan)

    def _prefixes(self, samples: Samples) -> SharedPrefixes:
        batch = samples.batch
        return SharedPrefixes.from_samples(
            [batch.tokens(i) for i in range(len(batch))],
            routing=samples.routing if self.model == "moe_replay" else None,
            mtp_num_layers=MODELS[self.model].mtp_num_layers,
        )


def plan_by_hand(samples: Samples, plain: Plan, prefixes: SharedPrefixes | None) -> Plan:
    """The plan of `SLOTS`, for the layout and the samples of a plain plan."""
    layout = plain.layout
    lengths = samples.batch.lengths
    table = None if prefixes is None else PrefixTable(prefixes, len(lengths), layout)
    ranks = made_ranks(SLOTS[samples.shape, layout.dp], lengths, layout, table)
    step = replace(plain.steps[0], ranks=ranks, num_microbatches=len(ranks[0]))
    plan = replace(
        plain,
        steps=(step,),
        policy=Policy(context_parallel="dynamic"),
        max_tokens_per_gpu=CAPACITY[layout.dp] // layout.cp,
        prefixes=prefixes,
    )
    check_plan(plan, lengths)
    return plan


def _sets(samples: Samples) -> list[int] | None:
    """Colocated sets: the pairs, for objectives of pairs."""
    if samples.shape != WideCase.shape_of_pairs:
        return None
    return [i // 2 for i in range(len(samples.family_of))]


def wide_facts(samples: Samples, plan: Plan) -> dict[str, Any]:
    """What the rows of a plan mix.

    Returns:
        rows_1, rows_2, rows_4: rows with samples, by their width.
        gpus: GPUs that rows are cut over.
        mixed_slots: places in the ranks' order with rows of several widths.
        padding_rows: padding micro-batches.
        padding_beside: those at the place of a wide row of other ranks.
        later_blocks: wide rows that do not begin at DP rank 0.
        packed_wide: wide rows of several samples.
        short_in_wide: samples that leave some GPU of their row without a token.
        shared_1, shared_2, shared_4: tokens that rows of a width do not hold again.
    """
    step = plan.steps[0]
    lengths = samples.batch.lengths
    rows = list(step.microbatches)
    full = [row for row in rows if row.samples]
    wide = [row for row in full if row.width > 1]
    slots = list(zip(*step.ranks, strict=True))
    beside = [row for slot in slots for row in slot if any(other.width > 1 for other in slot)]
    gpus = {row: plan.layout.cp * row.width for row in full}
    facts: dict[str, Any] = {
        "gpus": sorted(set(gpus.values())),
        "mixed_slots": sum(len({row.width for row in slot}) > 1 for slot in slots),
        "padding_rows": sum(not row.samples for row in rows),
        "padding_beside": sum(not row.samples for row in beside),
        "later_blocks": sum(row.dp_ranks[0] > 0 for row in wide),
        "packed_wide": sum(len(row.samples) > 1 for row in wide),
        "short_in_wide": sum(lengths[i] < gpus[row] for row in wide for i in row.samples),
    }
    for width in (1, 2, 4):
        own = [row for row in full if row.width == width]
        facts[f"rows_{width}"] = len(own)
        facts[f"shared_{width}"] = sum(row.shared_tokens for row in own)
    return facts
