"""Wrong prefixes are refused in one line, and common prompts come from groups."""

from __future__ import annotations

import pytest

from megapack import ConfigError, DataError, Layout, SharedPrefixes, build_dp_schedule
from megapack.prefixes import PrefixTable

pytestmark = pytest.mark.unit

LENGTHS = [10, 20, 30]


@pytest.mark.parametrize(
    ("prefixes", "what"),
    [
        (SharedPrefixes((0, 3), (0, 5)), "numbered 0 to 3 for a batch of 3"),
        (SharedPrefixes((-1, 1), (0, 5)), "numbered -1 to 1"),
        (SharedPrefixes((1, 1), (0, 5)), "at most once"),
        (SharedPrefixes((0, 1), (0, 11)), "sample 1 of 20 tokens has 11 .* at most 10"),
        (SharedPrefixes((0, 1), (0, -5)), "has -5 in common"),
        (SharedPrefixes((0, 1), (2, 5)), "sample 0 of 10 tokens has 2 .* at most 0"),
        (SharedPrefixes((0, 1), (0,)), "2 samples with 1 numbers"),
        (SharedPrefixes((0, 1), (0, 5), 0), "own_tokens=0"),
        (SharedPrefixes((0, 1), (0, 5), True), "own_tokens=True"),
        (SharedPrefixes((0, 1), (0, 2.5)), "common="),  # type: ignore[arg-type]
        (SharedPrefixes(("a", "b"), (0, 2)), "order="),  # type: ignore[arg-type]
        (SharedPrefixes((0, (1, 2)), (0, 2)), "order="),  # type: ignore[arg-type]
        (SharedPrefixes((0, 2**70), (0, 2)), "order="),
    ],
)
def test_wrong_prefixes_are_refused_in_one_line(prefixes: SharedPrefixes, what: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        build_dp_schedule(LENGTHS, layout=Layout(), max_tokens_per_gpu=64, prefixes=prefixes)
    assert len(str(caught.value).splitlines()) == 1


def test_prefixes_of_another_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="give SharedPrefixes"):
        build_dp_schedule(
            LENGTHS,
            layout=Layout(),
            max_tokens_per_gpu=64,
            prefixes=[(0, 1)],  # type: ignore[arg-type]
        )


def test_groups_share_their_prompts() -> None:
    groups = ["a", "b", "a", "c", "b", "a"]
    prompts = [5, 1, 5, 9, 1, 5]
    prefixes = SharedPrefixes.from_groups(groups, prompts)
    # A prompt of one token leaves no position to share, and c is alone.
    assert prefixes == SharedPrefixes((0, 2, 5), (0, 5, 5))
    assert SharedPrefixes.from_groups(groups, prompts, mtp_num_layers=4).order == ()


@pytest.mark.parametrize(
    ("prompts", "what"),
    [
        ([5, 1, 6, 9, 1, 5], "samples 0 and 2 are of group 'a' and have prompts of 5 and 6 tokens"),
        ([5, 1, 5, 9, 1], "6 group_ids for 5 samples"),
        ([5.0, 1, 5, 9, 1, 5], "prompt_tokens="),
    ],
)
def test_wrong_groups_are_refused(prompts: list[int], what: str) -> None:
    with pytest.raises(DataError, match=what):
        SharedPrefixes.from_groups(["a", "b", "a", "c", "b", "a"], prompts)


def test_shared_positions_are_whole_units_of_the_alignment() -> None:
    prefixes = SharedPrefixes((0, 1), (0, 30))
    for layout in (Layout(), Layout(cp=2), Layout(cp=8), Layout(fp8=True)):
        table = PrefixTable(prefixes, [100, 100], layout)
        unit = layout.sample_alignment
        assert table.shared.tolist() == [0, 29 // unit * unit]
