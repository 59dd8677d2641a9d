"""Packed rows of samples with images: features and positions of each token."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megapack.dp_schedule import build_dp_schedule
from megapack.errors import DataError
from megapack.images import ImageRef
from megapack.layout import Layout
from megapack.plan.plan import MicroBatch, Part
from megapack.prefixes import PrefixTable, SharedPrefixes
from megapack.rows.packing import pack_row
from megapack.rows.slices import slice_row
from megapack.samples import SampleBatch

pytestmark = pytest.mark.unit

CAT = ImageRef(offset=1, grid=(1, 2, 4), key="cat")
DOG = dataclasses.replace(CAT, key="dog")


def row_of(samples: tuple[int, ...], lengths: list[int], **more: object) -> MicroBatch:
    tokens = sum(lengths)
    return MicroBatch(samples, row_tokens=tokens, tokens=tokens, tokens_sq=0, padded_tokens=tokens,
                      **more)  # fmt: skip


def test_a_key_has_one_feature_per_token() -> None:
    batch = SampleBatch(
        [[5, 9, 9, 6], [5, 9, 9, 7, 8], [1, 2], [5, 9, 9, 6]], images=[[CAT], [DOG], [], [CAT]]
    )
    row = pack_row(batch, row_of((0, 1, 2, 3), batch.lengths), Layout())
    assert [ref.key for ref in row.images] == ["cat", "dog"]
    assert row.features_T is not None
    assert row.features_T.tolist() == [-1, 0, 1, -1, -1, 2, 3, -1, -1, -1, -1, -1, 0, 1, -1]
    assert row.rotary_T3 is not None
    assert row.rotary_T3[:9].tolist() == [
        *([0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3]),
        *([0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3], [4, 4, 4]),
    ]


def test_a_row_without_images_has_neither() -> None:
    batch = SampleBatch([[5, 9, 9, 6], [1, 2]], images=[[CAT], []])
    row = pack_row(batch, row_of((1,), [2]), Layout())
    assert row.images == ()
    assert row.features_T is None
    assert row.rotary_T3 is None


def test_a_piece_after_an_image_keeps_its_positions() -> None:
    tall = ImageRef(offset=1, grid=(1, 8, 8), key="tall")
    batch = SampleBatch([[5, *[9] * 16, *range(5)]], images=[[tall]])
    piece = row_of((0,), [4], pieces=(Part(0, begin=18, end=22),))
    row = pack_row(batch, piece, Layout())
    assert row.images == ()
    # The image's 16 tokens take 4 positions.
    assert row.rotary_T3 is not None
    assert row.rotary_T3[:, 0].tolist() == [6, 7, 8, 9]


def test_slices_follow_their_positions() -> None:
    batch = SampleBatch([[5, 9, 9, 6, 7, 8, 1, 2]], images=[[CAT]])
    row = pack_row(batch, row_of((0,), [8]), Layout(cp=2))
    parts = [slice_row(row, 2, rank) for rank in range(2)]
    for part in parts:
        for name in ("features_T", "rotary_T3"):
            whole = getattr(row, name)
            assert torch.equal(getattr(part, name), whole[part.row_positions_T])


def test_shared_positions_with_other_images_are_refused() -> None:
    tokens = [[5, 9, 9, 6, 1], [5, 9, 9, 6, 2]]
    batch = SampleBatch(tokens, images=[[CAT], [DOG]])
    by_ids = SharedPrefixes.from_samples(tokens)
    plan = build_dp_schedule(batch.lengths, layout=Layout(), max_tokens_per_gpu=16, prefixes=by_ids)
    (row,) = plan.steps[0].ranks[0]
    table = PrefixTable(by_ids, batch.lengths, Layout())
    with pytest.raises(DataError, match="have different images there"):
        pack_row(batch, row, Layout(), prefixes=table)


@pytest.mark.parametrize("offset", [0, 2])
def test_an_image_stands_at_one_id(offset: int) -> None:
    wrong = dataclasses.replace(CAT, offset=offset)
    batch = SampleBatch([[5, 9, 9, 6, 7]], images=[[wrong]])
    with pytest.raises(DataError, match=f"the image at token {offset} stands at the ids"):
        pack_row(batch, row_of((0,), [5]), Layout())
