"""megapack.hosts.ms_swift through ms-swift's own signature."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.hosts import ms_swift

pytestmark = pytest.mark.hosts

CAPACITY = 50
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
Items = list[tuple[str, int]]


def items(lengths: list[int]) -> Items:
    return [(f"sample {i}", length) for i, length in enumerate(lengths)]


def tokens(pack: Items) -> int:
    return sum(length for _, length in pack)


@given(lengths=LENGTHS)
def test_each_sequence_is_in_one_pack_within_the_length_or_alone(lengths: list[int]) -> None:
    packs, rest = ms_swift.calculate_matched_group(items(lengths), CAPACITY)
    assert rest == []
    assert sorted(item for pack in packs for item in pack) == sorted(items(lengths))
    assert all(tokens(pack) <= CAPACITY or len(pack) == 1 for pack in packs)
    # Two packs that fit into one would be one pack too many.
    light = sorted(tokens(pack) for pack in packs)
    assert len(light) < 2 or light[0] + light[1] > CAPACITY


def test_packs_of_equal_number_have_even_cost() -> None:
    # First-fit-decreasing fills 30 + 10 + 10 and leaves 10 for the second pack.
    packs, _ = ms_swift.calculate_matched_group(items([30, 10, 10, 10]), CAPACITY)
    assert sorted(map(tokens, packs)) == [30, 30]


@given(lengths=LENGTHS)
def test_the_lightest_pack_waits_for_the_next_portion(lengths: list[int]) -> None:
    packs, rest = ms_swift.calculate_matched_group(items(lengths), CAPACITY, is_finished=False)
    assert sorted(item for pack in [*packs, rest] for item in pack) == sorted(items(lengths))
    assert all(tokens(pack) >= tokens(rest) for pack in packs)
    assert rest


def test_other_strategies_are_ms_swifts_own(originals: dict[str, Any]) -> None:
    originals["swift.dataset.packing.calculate_matched_group"] = lambda *given: given
    found = ms_swift.calculate_matched_group(items([20, 30]), CAPACITY, False, "sequential")
    assert found == (items([20, 30]), CAPACITY, False, "sequential")  # type: ignore[comparison-overlap]
