"""The load balance of a sample in pieces is that of the whole sample, with its gradients."""

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
from megapack.rows.chain import link_rows
from megapack.rows.packed import PackedRow
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch

pytestmark = pytest.mark.unit

LENGTHS = [12, 4, 5]
ROWS: list[tuple[tuple[int, ...], tuple[int, int] | None]] = [
    ((0, 2), (0, 4)),
    ((0,), (4, 8)),
    ((0, 1), (8, 12)),
]
SHAPE = RoutingShape(num_layers=1, num_experts=4, top_k=2)


def row_of(samples: tuple[int, ...], piece: tuple[int, int] | None) -> PackedRow:
    batch = SampleBatch([list(range(n)) for n in LENGTHS])
    held = [LENGTHS[i] for i in samples]
    if piece is not None:
        held[0] = piece[1] - piece[0]
    # With one token of padding.
    pieces = () if piece is None else (Part(samples[0], *piece),)
    padded = sum(held) + 1
    micro_batch = MicroBatch(samples, padded, sum(held), 0, padded, pieces=pieces)
    row = pack_row(batch, micro_batch, Layout())
    routing = routing_row(row, torch.arange(row.row_tokens), None, SHAPE)
    return dataclasses.replace(row, routing=routing)


def chain_rows() -> list[PackedRow]:
    rows = [row_of(*row) for row in ROWS]
    links = link_rows(rows, keeps_gradients=True)
    return [
        dataclasses.replace(row, routing=dataclasses.replace(row.routing, link=link))
        for row, link in zip(rows, links, strict=True)
        if row.routing is not None
    ]


def leaf() -> Tensor:
    """Logits of all samples' tokens."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(sum(LENGTHS), SHAPE.num_experts, generator=generator).requires_grad_()


def scores_and_chosen(logits: Tensor, row: PackedRow) -> tuple[Tensor, Tensor]:
    """Of each token of the row; padding has logits of 0."""
    firsts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    tokens_N = torch.cat([torch.arange(LENGTHS[i]) + firsts[i] for i in row.samples])
    held_N = row.positions_N >= 0
    positions = row.positions_N[held_N]
    own = torch.zeros(row.row_tokens, SHAPE.num_experts).index_copy(
        0, positions, logits[tokens_N[held_N]]
    )
    top = own.topk(SHAPE.top_k).indices
    chosen = torch.zeros_like(own, dtype=torch.bool).scatter(1, top, value=True)
    return own.softmax(-1), chosen


def whole() -> tuple[float, Tensor]:
    logits = leaf()
    row = row_of((0, 1, 2), None)
    assert row.routing is not None
    loss = balance_loss(*scores_and_chosen(logits, row), row.routing, SHAPE.top_k)
    loss.backward()
    assert logits.grad is not None
    return float(loss.detach()), logits.grad


@pytest.mark.parametrize("recomputes", [False, True])
def test_losses_add_up_to_those_of_whole_samples(*, recomputes: bool) -> None:
    logits = leaf()
    reported: list[float] = []

    def loss_of(row: PackedRow, logits: Tensor) -> Tensor:
        assert row.routing is not None
        scores, chosen = scores_and_chosen(logits, row)
        loss = piece_balance_loss("layer", scores, chosen, row.routing, SHAPE.top_k)
        if torch.is_grad_enabled():
            reported.append(float(loss.detach()))
        return loss

    losses = []
    for row in chain_rows():
        if recomputes:
            losses.append(checkpoint(loss_of, row, logits * 1.0, use_reentrant=True))
        else:
            losses.append(loss_of(row, logits * 1.0))
    for loss in reversed(losses):
        loss.backward()
    expected, gradient = whole()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, gradient)
    assert sum(reported) == pytest.approx(expected)
