"""megapack.hosts.ms_swift through ms-swift's own signature."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack import ConfigError
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


SEQUENTIAL = [
    ([20, 20, 20, 50, 1], False, [[20, 20], [20], [50]], [1]),
    ([20, 20, 20, 50], False, [[20, 20], [20], [50]], []),
    ([20, 20, 20], False, [[20, 20]], [20]),
    ([20, 20, 20], True, [[20, 20], [20]], []),
    ([60, 1], True, [[60], [1]], []),
]


@pytest.mark.parametrize(("lengths", "finished", "packs", "rest"), SEQUENTIAL)
def test_sequential_keeps_the_input_order(
    lengths: list[int], finished: bool, packs: list[list[int]], rest: list[int]
) -> None:
    found = ms_swift.calculate_matched_group(items(lengths), CAPACITY, finished, "sequential")
    assert [[length for _, length in pack] for pack in found[0]] == packs
    assert [length for _, length in found[1]] == rest


def test_no_sequences_and_an_unknown_strategy() -> None:
    assert ms_swift.calculate_matched_group([], CAPACITY) == ([], [])
    with pytest.raises(ConfigError, match="packing_strategy='best'"):
        ms_swift.calculate_matched_group(items([1]), CAPACITY, strategy="best")
