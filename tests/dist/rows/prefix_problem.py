"""The problem of the cases with shared prefixes: shapes of families, and what rows share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from megapack.dp_schedule import build_dp_schedule
from megapack.plan import Plan
from megapack.policy import Policy
from megapack.prefixes import PrefixTable, SharedPrefixes, row_branches
from tests.dist.rows.row_problem import MODELS, Family, RowCase, Samples

_GROUP: Family = (13, [7, 1, 22, 0, 12])
_DEEP: Family = (9, [(6, [(4, [5, 3]), 7]), (5, [2, 4]), 3])
# 24 shared tokens and 63 of responses: more than a row of 64, and each half less.
_LONG: Family = (24, [9, 12, 10, 11, 8, 13])
_TWICE: Family = (5, [(6, [0, 0])])
_SMALL: Family = (8, [4, 6])

SHAPES: dict[str, list[Family]] = {
    "mixed": [_GROUP, _DEEP, (1, [6, 11]), _LONG, _TWICE, _SMALL, (3, [14]), (1, [25])],
    "pairs": [
        *[_LONG, (13, [7, 1, 22, 5]), (9, [(6, [(4, [5, 3]), 7]), 10])],
        *[(8, [4, 6]), (1, [6, 11]), (16, [5, 3])],
    ],
    "g1": [(p, [r]) for p, r in [(9, 14), (4, 21), (12, 3), (7, 7), (15, 11), (2, 30)]],
    "g2": [(p, [r, r + 3]) for p, r in [(9, 11), (4, 15), (12, 3), (7, 7), (15, 8), (20, 2)]],
    "g8": [(10, [3, 9, 1, 5, 6, 2, 7, 4]), (6, [4, 2, 8, 3, 1, 6, 5, 7])],
    "one-token prompts": [(1, [6, 11]), (1, [(9, [4, 5]), 7]), (1, [9, 2, 8])],
    "no responses": [(13, [7, 0, 12]), (6, [0, 0]), (9, [(4, [0, 5]), 3])],
    "depth 3": [_DEEP, (5, [(3, [(4, [(2, [3, 1]), 6]), 5]), 4])],
    "cut in two": [_LONG],
    "equal samples": [_TWICE, (9, [4, 7]), (3, [(8, [0, 0, 0])])],
}
"""Families by name. `mixed` has all of the others' features; `pairs` has a pair in every two
leaves."""

SHARING: dict[str, dict[str, int]] = {
    "mixed": {"families_in_a_row": 2, "depth": 3, "cut_families": 1, "shared_losses": 20},
    "pairs": {"cut_families": 1, "shared_losses": 20},
    "g1": {},
    "g2": {"families_in_a_row": 2},
    "g8": {"cut_families": 1},
    "one-token prompts": {"shared_losses": 10},
    "no responses": {"shared_losses": 5},
    "depth 3": {"depth": 3, "shared_losses": 40},
    "cut in two": {"cut_families": 1},
    "equal samples": {"shared_losses": 30},
}
"""What plans of each shape must have at least, see `sharing_facts`; all but `g1` share tokens."""


@dataclass(frozen=True, kw_only=True)
class PrefixCase(RowCase):
    """A case whose rows share prefixes."""

    shape: str = "mixed"
    kinds: tuple[str, ...] = ("sft", "grpo", "gspo", "dpo", "value")
    policy: Policy = field(default_factory=Policy)
    row_tokens: int = 64
    """The budget of a row, before it is cut over context-parallel ranks."""
    expect: dict[str, int] = field(default_factory=dict)
    """What the plans must have at least, besides what `SHARING` says."""

    shapes = SHAPES
    shape_of_pairs = "pairs"

    def plans(self, samples: Samples) -> tuple[Plan, Plan]:
        return self.plan(samples, shared=True), self.plan(samples, shared=False)

    def facts(self, samples: Samples, plan: Plan) -> dict[str, Any]:
        return sharing_facts(samples, plan)

    def plan(self, samples: Samples, *, shared: bool) -> Plan:
        """The plan of a shape, with each pair of `pairs` in one row."""
        batch = samples.batch
        settings = MODELS[self.model]
        prefixes = SharedPrefixes.from_samples(
            [batch.tokens(i) for i in range(len(batch))],
            routing=samples.routing if self.model == "moe_replay" else None,
            mtp_num_layers=settings.mtp_num_layers,
        )
        policy = self.policy
        if not shared:
            policy = dataclasses.replace(policy, share_prefixes="off")
        return build_dp_schedule(
            batch.lengths,
            layout=self.layout,
            max_tokens_per_gpu=self.row_tokens // self.layout.cp,
            colocate_ids=_sets(samples),
            policy=policy,
            prefixes=prefixes,
        )


def _sets(samples: Samples) -> list[int] | None:
    """Colocated sets: the pairs of `pairs`; in `mixed` two families, which then meet in a row."""
    if samples.shape == "pairs":
        return [i // 2 for i in range(len(samples.family_of))]
    if samples.shape != "mixed":
        return None
    together = (_TWICE, _SMALL)
    first = samples.family_of.index(SHAPES["mixed"].index(_TWICE))
    return [
        first if SHAPES["mixed"][family] in together else i
        for i, family in enumerate(samples.family_of)
    ]


def sharing_facts(samples: Samples, plan: Plan) -> dict[str, Any]:
    """What the rows of a plan share.

    Returns:
        tokens, shared_tokens: real tokens of the samples, and positions that rows save.
        families_in_a_row: most families that share in one row.
        depth: most prefixes on top of one another.
        cut_families: families that share in each of several rows.
        shared_losses: losses at positions that have one for several samples.
        padding_rows, dummy_rows: padding micro-batches, and rows longer than their samples.
    """
    batch = samples.batch
    table = None
    if plan.prefixes is not None:
        table = PrefixTable(plan.prefixes, len(batch), plan.layout)
    rows_of: dict[int, int] = {}
    most = 0
    depth = 0
    shared_losses = 0
    rows = list(plan.steps[0].microbatches)
    for row in rows:
        lengths = [batch.length(i) for i in row.samples]
        branches = row_branches(row.samples, lengths, plan.layout, table)
        families = set()
        depths = []
        for branch in branches:
            above = depths[branch.parent] if branch.parent >= 0 else 0
            depths.append(above + (len(branch.samples) > 1))
            if len(branch.samples) == 1:
                continue
            families.add(samples.family_of[row.samples[branch.samples[0]]])
            for k in branch.samples:
                mask = batch.response_mask(row.samples[k])
                labels = mask[branch.offset + 1 : branch.offset + branch.tokens + 1]
                shared_losses += int(labels.sum())
        for family in families:
            rows_of[family] = rows_of.get(family, 0) + 1
        most = max(most, len(families))
        depth = max([depth, *depths])
    return {
        "tokens": sum(row.tokens for row in rows),
        "shared_tokens": sum(row.shared_tokens for row in rows),
        "families_in_a_row": most,
        "depth": depth,
        "cut_families": sum(count > 1 for count in rows_of.values()),
        "shared_losses": shared_losses,
        "padding_rows": sum(not row.samples for row in rows),
        "dummy_rows": sum(bool(row.samples) and row.row_tokens > row.padded_tokens for row in rows),
        "rows": len(rows),
        "row_lengths": len({row.row_tokens for row in rows}),
    }
