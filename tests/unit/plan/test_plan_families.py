"""Plans with families in pieces: forms, counts, invariants 4, 7, 8 and 10."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megapack.errors import PlanError
from megapack.layout import Layout
from megapack.outlook.stats import carried
from megapack.plan import MicroBatch, Part, Plan, StepPlan, check_plan
from megapack.plan.order import chain_order
from megapack.policy import Policy
from megapack.prefixes import SharedPrefixes

LAYOUT = Layout(pp=2)
LENGTHS = [20, 16, 14, 6]
# Samples 0 to 2 share 10 positions, the first two of them 12.
PREFIXES = SharedPrefixes((0, 1, 2), (0, 13, 11))


def row(tokens_sq: int, shared: int, *parts: Part, whole: tuple[int, ...] = ()) -> MicroBatch:
    tokens = sum(part.tokens for part in parts) + sum(LENGTHS[i] for i in whole)
    samples = (*(part.sample for part in parts), *whole)
    held = tokens - shared
    return MicroBatch(samples, held, tokens, tokens_sq, held, shared, pieces=parts)


FIRST = row(100 + 36, 20, *(Part(i, 0, 10) for i in (0, 1, 2)), whole=(3,))
SECOND = row(300 + 156 - 44, 2, Part(0, 10, 20), Part(1, 10, 16))
THIRD = row(96, 0, Part(2, 10, 14))
ROWS = (FIRST, SECOND, THIRD)


def plan(rows: tuple[MicroBatch, ...] = ROWS, **changed: Any) -> Plan:
    orders = (chain_order(2, 1, len(rows), 1, [range(len(rows))]).lines(),)
    step = StepPlan((rows,), len(rows), None, (0, 1, 2, 3), (), orders)
    if changed.get("colocate_ids"):
        step = dataclasses.replace(
            step, kept_rollouts=tuple(dict.fromkeys(changed["colocate_ids"]))
        )
        changed["rollout_ids"] = changed["colocate_ids"]
    values: dict[str, Any] = {
        "steps": (step,),
        "layout": LAYOUT,
        "policy": Policy(split_samples="auto", max_live_tokens_per_gpu=100),
        "max_tokens_per_gpu": 20,
        "micro_batch_size": None,
        "num_samples": 4,
        "rollout_ids": None,
        "prefixes": PREFIXES,
    }
    return Plan(**{**values, **changed})


def test_a_family_in_three_rows_has_exact_forms_and_counts() -> None:
    made = plan()
    check_plan(made, LENGTHS)
    assert Plan.from_json(made.to_json()) == made
    counts = made.counts
    assert (counts.num_samples, counts.tokens, counts.shared_tokens) == (4, 56, 22)
    assert (counts.num_split_samples, counts.num_pieces) == (3, 6)
    assert made.steps[0].chains(0) == [range(3)]
    assert made.steps[0].kept_samples == (0, 1, 2, 3)


def test_a_colocated_set_may_be_in_the_pieces_of_one_family() -> None:
    check_plan(plan(colocate_ids=(7, 8, 7, 9)), LENGTHS)
    with pytest.raises(PlanError, match=r"invariant 10 .* split sample 1, one of 2 in a colocated"):
        check_plan(plan(colocate_ids=(7, 8, 7, 8)), LENGTHS)


def test_keys_of_the_prefix_are_kept_once() -> None:
    held = carried(plan())
    assert held.tokens == 10
    # All three rows are live at the first backward; the second one reads the prefix twice.
    assert held.earlier_tokens == 20 + 10


BROKEN: dict[str, tuple[str, tuple[MicroBatch, ...]]] = {
    "another end": (
        r"10 .* begin with 3 pieces that end at \[8, 10\], and share 18 tokens instead of all",
        (
            row(0, 18, Part(0, 0, 10), Part(1, 0, 10), Part(2, 0, 8), whole=(3,)),
            SECOND,
            row(0, 0, Part(2, 8, 14)),
        ),
    ),
    "beyond the prefix": (
        r"10 .* begin with 3 pieces that end at \[12\], and share 22 tokens instead of all",
        (
            row(0, 22, *(Part(i, 0, 12) for i in (0, 1, 2)), whole=(3,)),
            row(0, 0, Part(0, 12, 20), Part(1, 12, 16)),
            row(0, 0, Part(2, 12, 14)),
        ),
    ),
    "three pieces": (
        r"10 .* have 3 pieces of a sample of a family, not 2",
        (FIRST, row(0, 0, Part(0, 10, 14), Part(1, 10, 16)), row(0, 0, Part(0, 14, 20)), THIRD),
    ),
    "a sample that does not begin": (
        r"10 .* have the pieces \[\(10, 14\)\] of sample 2, which has 14 tokens",
        (row(0, 10, Part(0, 0, 10), Part(1, 0, 10), whole=(3,)), SECOND, THIRD),
    ),
    "a row between": (
        r"10 .* have the pieces \[\(0, 10\)\] of sample 0, which has 20 tokens",
        (dataclasses.replace(FIRST, samples=(0, 1, 2)), row(36, 0, whole=(3,)), SECOND, THIRD),
    ),
    "whole samples before pieces": (
        r"10 .* have pieces that are not the first of their row",
        (dataclasses.replace(FIRST, samples=(3, 0, 1, 2)), SECOND, THIRD),
    ),
    "shared twice": (
        r"8 .* shared_tokens 0, not 2",
        (FIRST, row(456, 0, Part(0, 10, 20), Part(1, 10, 16)), THIRD),
    ),
    "other attention": (
        r"4 .* \(16, 456, 14\), not \(16, 412, 14\)",
        (FIRST, dataclasses.replace(SECOND, tokens_sq=456), THIRD),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_invariants(name: str) -> None:
    message, rows = BROKEN[name]
    with pytest.raises(PlanError, match=f"invariant {message}"):
        check_plan(plan(rows), LENGTHS)


def test_damaged_cells_are_refused() -> None:
    text = plan().to_json()
    for damaged in (
        text.replace("1,10,20,10,16]", "1,10,20,10]"),
        text.replace("1,10,20,10,16]", "1,10,20,16,10]"),
        text.replace("1,10,14]", "1,10,14,10,14]"),
    ):
        assert damaged != text
        with pytest.raises(PlanError, match="not a plan"):
            Plan.from_json(damaged)
