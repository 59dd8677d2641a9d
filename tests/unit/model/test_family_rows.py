"""A family in pieces: its rows, attention and load balance are those of whole samples."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megapack.layout import Layout
from megapack.model.experts.chains import piece_balance_loss
from megapack.model.experts.rows import RoutingShape, balance_loss, routing_row
from megapack.plan import MicroBatch, Part
from megapack.prefixes import EARLIER, PrefixTable, SharedPrefixes, row_branches
from megapack.rows.chain import Piece, link_rows
from megapack.rows.packed import PackedRow
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch

pytestmark = pytest.mark.unit

HEADS, GROUPS, D = 4, 2, 8
PROMPT = list(range(10, 22))
SAMPLES = [[7], [*PROMPT, 1, 2, 3], [*PROMPT, 4, 4, 4, 5], [*PROMPT, 4, 4, 4, 6, 6, 6, 6]]
"""Samples 1 to 3 share 11 positions, and the last two of them 14."""
LENGTHS = list(map(len, SAMPLES))
FIRSTS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
ROWS: list[tuple[tuple[int, ...], tuple[Part, ...]]] = [
    ((3, 1, 2, 0), tuple(Part(i, 0, 8) for i in (3, 1, 2))),
    ((1,), (Part(1, 8, LENGTHS[1]),)),
    ((2, 3), (Part(2, 8, LENGTHS[2]), Part(3, 8, LENGTHS[3]))),
]
SHAPE = RoutingShape(num_layers=1, num_experts=4, top_k=2)


def table(layout: Layout) -> PrefixTable:
    return PrefixTable(SharedPrefixes.from_samples(SAMPLES), [*map(len, SAMPLES)], layout)


def rows(layout: Layout | None = None) -> list[PackedRow]:
    """The rows of the family, each with one token of padding or more."""
    layout = layout or Layout()
    made = []
    for samples, pieces in ROWS:
        spans = {part.sample: part for part in pieces}
        tokens = sum(spans[i].tokens if i in spans else LENGTHS[i] for i in samples)
        branches = row_branches(
            samples, [LENGTHS[i] for i in samples], layout, table(layout), pieces
        )
        padded = branches[-1].end + layout.row_alignment
        micro_batch = MicroBatch(samples, padded, tokens, 0, padded, pieces=pieces)
        made.append(pack_row(SampleBatch(SAMPLES), micro_batch, layout, prefixes=table(layout)))
    return made


def test_rows_of_a_family_by_eye() -> None:
    first, second, third = rows()
    assert first.tokens_T.tolist() == [*PROMPT[:8], 7, 0]
    assert first.labels_T.tolist() == [*PROMPT[1:9], 0, 0]
    assert first.piece == Piece(continues=False, start=0, kept_tokens=8)
    # Each of the eight positions has a loss for each of three samples.
    assert first.losses.sample_of_R.bincount().tolist() == [8, 8, 8]
    assert second.tokens_T.tolist() == [*PROMPT[8:], 1, 2, 3, 0]
    assert third.tokens_T.tolist() == [*PROMPT[8:], 4, 4, 4, 5, 4, 6, 6, 6, 6, 0]
    assert third.position_ids_T.tolist() == [*range(8, 16), *range(14, 19), 0]
    assert third.piece == Piece(continues=True, start=0, kept_tokens=0)
    shown = [(b.start, b.tokens, b.offset, b.parent, b.samples) for b in third.branches]
    assert shown == [
        (0, 6, 8, EARLIER, (0, 1)),
        (6, 2, 14, 0, (0,)),
        (8, 5, 14, 0, (1,)),
    ]
    assert [link and link.earlier for link in link_rows(rows(), keeps_gradients=True)] == [
        *((), (8,), (8,))
    ]


def tokens_of(row: PackedRow) -> tuple[Tensor, Tensor]:
    """The positions of the row that have tokens, and which tokens of all samples stand for them."""
    token_of: dict[int, int] = {}
    tokens = canonical().tolist()
    for sample, own in zip(row.samples, torch.split(row.positions_N, row.lengths), strict=True):
        for token, position in enumerate(own.tolist(), FIRSTS[sample]):
            if position >= 0:
                token_of[position] = tokens[token]
    return torch.tensor(list(token_of)), torch.tensor(list(token_of.values()))


def canonical() -> Tensor:
    """For each token of all samples the first one with the same tokens before it."""
    known: dict[tuple[int, ...], int] = {}
    beginnings = (tuple(ids[: k + 1]) for ids in SAMPLES for k in range(len(ids)))
    return torch.tensor([known.setdefault(path, n) for n, path in enumerate(beginnings)])


def _in_row(values: Tensor, row: PackedRow) -> Tensor:
    position, token = tokens_of(row)
    return torch.zeros(row.row_tokens, *values.shape[1:]).index_copy(0, position, values[token])


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_load_balance_is_that_of_whole_samples(*, recomputes: bool) -> None:
    def logits() -> Tensor:
        generator = torch.Generator().manual_seed(4)
        return torch.randn(sum(LENGTHS), SHAPE.num_experts, generator=generator).requires_grad_()

    def routed(row: PackedRow, values: Tensor) -> tuple[Tensor, Tensor]:
        own = _in_row(values, row)
        chosen = torch.zeros_like(own, dtype=torch.bool)
        return own.softmax(-1), chosen.scatter(1, own.topk(SHAPE.top_k).indices, value=True)

    whole, found = logits(), logits()
    micro_batch = MicroBatch((0, 1, 2, 3), sum(LENGTHS), sum(LENGTHS), 0, sum(LENGTHS))
    row = pack_row(SampleBatch(SAMPLES), micro_batch, Layout())
    routing = routing_row(row, torch.arange(row.row_tokens), None, SHAPE)
    expected = balance_loss(*routed(row, whole), routing, SHAPE.top_k)
    expected.backward()
    made = rows()
    links = link_rows(made, keeps_gradients=True)
    reported = []
    losses = []
    for row, link in zip(made, links, strict=True):
        routing = routing_row(row, torch.arange(row.row_tokens), None, SHAPE)
        routing = dataclasses.replace(routing, link=link)

        def run(values: Tensor, row: PackedRow = row, routing: object = routing) -> Tensor:
            loss = piece_balance_loss("layer", *routed(row, values), routing, SHAPE.top_k)  # type: ignore[arg-type]
            if torch.is_grad_enabled():
                reported.append(float(loss.detach()))
            return loss

        once = found * 1.0
        losses.append(checkpoint(run, once, use_reentrant=True) if recomputes else run(once))
    for loss in reversed(losses):
        loss.backward()
    assert sum(reported) == pytest.approx(float(expected.detach()))
    torch.testing.assert_close(found.grad, whole.grad)
