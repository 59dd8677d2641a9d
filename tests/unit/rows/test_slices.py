"""Context-parallel slices with small numbers that can be checked by eye."""

from __future__ import annotations

import pytest
import torch

from megapack.errors import DataError
from megapack.layout import Layout
from megapack.plan import MicroBatch
from megapack.rows.packed import PackedRow
from megapack.rows.packing import pack_row
from megapack.rows.slices import slice_row
from megapack.samples import SampleBatch

pytestmark = pytest.mark.unit


def row(layout: Layout) -> PackedRow:
    """Samples of 5 and 3 tokens; the first token of the second is its prompt."""
    batch = SampleBatch.from_prompt_response(
        [[], [20]],
        [[10, 11, 12, 13, 14], [21, 22]],
        {"old": [[0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0]]},
    )
    tokens = layout.padded_tokens([5, 3])
    return pack_row(batch, MicroBatch((0, 1), tokens, 8, 0, tokens), layout)


def test_a_rank_holds_an_early_and_a_late_part_of_each_sample() -> None:
    first, last = (slice_row(row(Layout(cp=2)), 2, rank) for rank in range(2))
    assert first.tokens_T.tolist() == [10, 11, 0, 0, 20, 0]
    assert last.tokens_T.tolist() == [12, 13, 14, 0, 21, 22]
    assert first.position_ids_T.tolist() == [0, 1, 6, 7, 0, 3]
    assert last.position_ids_T.tolist() == [2, 3, 4, 5, 1, 2]
    assert first.labels_T.tolist() == [11, 12, 0, 0, 21, 0]
    assert last.labels_T.tolist() == [13, 14, 0, 0, 22, 0]
    assert first.losses.fields["old"].tolist() == [1, 2, 5]
    assert last.losses.fields["old"].tolist() == [3, 4, 6]


def test_a_row_packed_for_fewer_ranks_is_refused() -> None:
    with pytest.raises(DataError, match=r"of 4 padded tokens .* 8 parts; pack with Layout\(cp=4\)"):
        slice_row(row(Layout(cp=2)), 4, 0)


def test_slices_of_a_short_sample_may_be_all_padding() -> None:
    batch = SampleBatch([[7]])
    whole = pack_row(batch, MicroBatch((0,), 8, 1, 0, 8), Layout(cp=4))
    for rank in range(4):
        part = slice_row(whole, 4, rank)
        assert part.tokens_T.tolist() == ([7, 0] if rank == 0 else [0, 0])
        assert part.losses.positions_R.dtype == torch.int64
        assert part.losses.positions_R.numel() == 0
