"""The segments of a row as levels, and the longer row of its convolution."""

from __future__ import annotations

import pytest
import torch

from megapack.prefixes import EARLIER
from tests.recurrent_rows import segments_of

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def test_whole_samples_are_one_level() -> None:
    segments = segments_of([3, 2, 4], [-1, -1])
    (level,) = segments.levels
    assert segments.order_T is None
    assert level.positions_L is None
    assert level.parents_N is None
    assert not level.hands_on
    assert level.ends_N1.tolist() == level.host_ends_N1.tolist() == [0, 3, 5, 9]
    assert level.numbers_1L.dtype == torch.int32
    assert level.numbers_1L.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 2]]


def test_a_tree_has_a_level_per_depth() -> None:
    #       0 (2)        4 (1)
    #   1 (1)  3 (2)
    #   2 (3)
    segments = segments_of([2, 1, 3, 2, 1], [-1, 0, 1, 0, -1])
    assert [level.lengths for level in segments.levels] == [(2, 1), (1, 2), (3,)]
    assert [level.hands_on for level in segments.levels] == [True, True, False]
    roots, middle, leaves = segments.levels
    assert roots.parents_N is None
    assert middle.parents_N is not None
    assert leaves.parents_N is not None
    assert middle.parents_N.tolist() == [0, 0]
    assert leaves.parents_N.tolist() == [0]
    positions = [level.positions_L for level in segments.levels]
    in_levels = torch.cat([own for own in positions if own is not None])
    assert in_levels.tolist() == [0, 1, 8, 2, 6, 7, 3, 4, 5]
    assert segments.order_T is not None
    assert in_levels[segments.order_T].tolist() == list(range(9))


def test_a_piece_begins_with_what_is_earlier_and_the_next_one_with_its_end() -> None:
    segments = segments_of([2, 3, 1], [EARLIER, 0, -1], kept=1)
    first, second = segments.levels
    assert first.parents_N is not None
    assert first.parents_N.tolist() == [1, 0]
    assert segments.kept_place == (1, 0)
    assert second.hands_on


def test_a_whole_row_leaves_what_its_last_segment_ends_with() -> None:
    segments = segments_of([2, 3], [-1, -1], kept=1)
    assert segments.levels[0].hands_on
    assert segments.kept_place == (0, 1)


def test_padding_of_a_level_and_back() -> None:
    (level,) = segments_of([1, 3], []).levels
    values = torch.arange(8.0).view(4, 2)
    padded = level.padded(values)
    assert padded.tolist() == [[[0, 1], [0, 0], [0, 0]], [[2, 3], [4, 5], [6, 7]]]
    assert torch.equal(level.unpadded(padded), values)


def test_the_convolution_reads_the_path_through_segments_shorter_than_its_reach() -> None:
    # Lines 0, 1, 2 are what is earlier, 3 is zeros, 4 on are the row.
    segments = segments_of([1, 1, 2, 1], [EARLIER, 0, 1, -1], kept=1)
    way = segments.convolution(4, CPU)
    assert way.lines_C.split([4, 4, 5, 4])[0].tolist() == [0, 1, 2, 4]
    assert way.lines_C.split([4, 4, 5, 4])[1].tolist() == [1, 2, 4, 5]
    assert way.lines_C.split([4, 4, 5, 4])[2].tolist() == [2, 4, 5, 6, 7]
    assert way.lines_C.split([4, 4, 5, 4])[3].tolist() == [3, 3, 3, 8]
    # Output k sees the lines from k to k + 3.
    last_seen = way.lines_C[way.kept_T + 3]
    assert last_seen.tolist() == [4, 5, 6, 7, 8]
    assert way.tail is not None
    assert way.tail.tolist() == [2, 4, 5]
    assert segments.convolution(4, CPU) is way
    assert segments.convolution(2, CPU).lines_C.tolist() == [0, 2, 2, 3, 3, 4, 5, 1, 6]
