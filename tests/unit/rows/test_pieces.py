"""Rows that begin with a piece of a sample: each token and each loss is in one of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megapack.errors import DataError
from megapack.layout import Layout
from megapack.model.experts.rows import RoutingShape, routing_row
from megapack.plan import MicroBatch, Part
from megapack.rows.chain import Piece, link_rows
from megapack.rows.packed import PackedRow, unpack_row
from megapack.rows.packing import pack_row
from megapack.rows.slices import slice_row
from megapack.samples import SampleBatch, TensorField

pytestmark = pytest.mark.unit

TOKENS = [[5, 6, 7, 8, 9, 10, 11], [1, 2, 3]]
PIECES = [(0, 4), (4, 7)]


def batch(**fields: list[Any]) -> SampleBatch:
    return SampleBatch(TOKENS, {"number": [torch.tensor(0.5), torch.tensor(1.5)], **fields})


def piece_row(
    samples: tuple[int, ...],
    piece: tuple[int, int],
    *,
    layout: Layout | None = None,
    data: SampleBatch | None = None,
) -> PackedRow:
    layout = layout or Layout()
    held = [piece[1] - piece[0], *(len(TOKENS[i]) for i in samples[1:])]
    padded = layout.padded_tokens(held)
    pieces = (Part(samples[0], *piece),)
    micro_batch = MicroBatch(samples, padded, sum(held), 0, padded, pieces=pieces)
    return pack_row(data or batch(), micro_batch, layout)


def rows(layout: Layout | None = None) -> list[PackedRow]:
    """The first piece alone, the last one with another sample."""
    return [piece_row((0,), PIECES[0], layout=layout), piece_row((0, 1), PIECES[1], layout=layout)]


def test_two_chains_in_turn_keep_what_is_theirs() -> None:
    begin, end = rows()
    middle = dataclasses.replace(begin, piece=Piece(continues=True, start=0, kept_tokens=4))
    whole = dataclasses.replace(begin, piece=None)
    made = link_rows([begin, end, whole, begin, middle, end], keeps_gradients=True)
    assert made[2] is None
    links = [link for link in made if link is not None]
    assert [(link.index, link.earlier, link.is_last) for link in links] == [
        *((0, (), False), (1, (4,), True)),
        *((0, (), False), (1, (4,), False), (2, (4, 4), True)),
    ]
    assert [link.samples_n.tolist() for link in links] == [[0], [0, 1], [0], [0], [0, 1]]
    links[0].kept("layer")[0] = "keys"
    assert [len(link.kept("layer")) for link in links] == [1, 1, 0, 0, 0]


def test_a_later_piece_by_eye() -> None:
    row = rows()[1]
    assert row.tokens_T.tolist() == [9, 10, 11, 1, 2, 3]
    assert row.position_ids_T.tolist() == [4, 5, 6, 0, 1, 2]
    assert row.labels_T.tolist() == [10, 11, 0, 2, 3, 0]
    assert row.branch_of_T.tolist() == [0, 0, 0, 1, 1, 1]
    assert row.positions_N.tolist() == [-1, -1, -1, -1, 0, 1, 2, 3, 4, 5]
    assert row.losses.label_index_R.tolist() == [5, 6, 8, 9]
    assert row.losses.sample_of_R.tolist() == [0, 0, 1, 1]
    assert row.end_positions_E.tolist() == [2, 5]
    assert row.end_samples_E.tolist() == [0, 1]
    assert row.lengths == (7, 3)
    assert row.max_seqlen == 7
    assert row.piece == Piece(continues=True, start=0, kept_tokens=0)


def test_the_label_of_a_piece_s_last_token_is_the_next_token_of_the_sample() -> None:
    row = rows()[0]
    assert row.labels_T.tolist() == [6, 7, 8, 9]
    assert row.losses.positions_R.tolist() == [0, 1, 2, 3]
    assert row.losses.label_index_R.tolist() == [1, 2, 3, 4]
    assert row.end_positions_E.numel() == row.end_samples_E.numel() == 0
    assert row.piece == Piece(continues=False, start=0, kept_tokens=4)


@pytest.mark.parametrize("cp", [1, 2])
def test_the_losses_of_all_rows_are_those_of_the_whole_samples(cp: int) -> None:
    layout = Layout(cp=cp)
    totals = [torch.zeros(7, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)]
    for row in rows(layout):
        for rank in range(cp):
            part = slice_row(row, cp, rank)
            labels_R = part.labels_T[part.losses.positions_R]
            for sample, own in zip(row.samples, unpack_row(part, labels_R), strict=True):
                totals[sample] += own
    assert [own.tolist() for own in totals] == [[0, *TOKENS[0][1:]], [0, *TOKENS[1][1:]]]


def test_routes_are_those_of_the_piece_s_tokens() -> None:
    choices = [torch.arange(7)[:, None, None] % 5, torch.tensor([[[4]], [[3]]])]
    row = rows()[1]
    routed = routing_row(
        row, torch.arange(6), choices, RoutingShape(num_layers=1, num_experts=5, top_k=1)
    )
    assert routed.choices_tLK is not None
    assert routed.choices_tLK.flatten().tolist() == [4, 0, 1, 4, 3, 5 % 5]
    assert routed.tokens_O.tolist() == [0, 1, 2, 3, 4, 5]
    assert routed.offsets_O.tolist() == [4, 5, 6, 0, 1, 2]
    assert routed.samples_O.tolist() == [0, 0, 0, 1, 1, 1]


def test_tensors_of_a_sample_in_pieces_are_refused() -> None:
    images = TensorField([torch.zeros(1, 2), torch.zeros(1, 2)])
    data = SampleBatch(TOKENS, {}, tensors={"pixels": images})
    with pytest.raises(DataError, match=r"sample 0 is in pieces, .*'pixels', which is not cut"):
        piece_row((0,), PIECES[0], data=data)


def test_another_length_than_the_plan_s_is_refused() -> None:
    with pytest.raises(DataError, match="hold 5 tokens, the plan counts 5; plan with the lengths"):
        piece_row((0,), (4, 9))
