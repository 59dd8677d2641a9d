"""Attention of a sample's pieces equals that of the whole sample, with its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megapack.layout import Layout
from megapack.model import carried
from megapack.model.attention.packed import packed_seq_params, row_params
from megapack.model.attention.row import RowView, row_view
from megapack.model.attention.sdpa import (
    PackedSDPA,
)
from megapack.model.attention.te_rows import gathered_params
from megapack.plan import MicroBatch, Part
from megapack.prefixes import EARLIER, Branch
from megapack.rows.chain import Chain, Link, Piece, link_rows
from megapack.rows.packed import PlacedRow
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch
from tests.packed_attention import sample_attention

pytestmark = pytest.mark.unit

HEADS, GROUPS, D = 4, 2, 8
SCALE = 1 / math.sqrt(D)
LENGTHS = [20, 6]
PIECES = [(0, 8), (8, 12), (12, 20)]
"""Of sample 0; sample 1 follows the second one."""

Forward = Callable[..., Tensor]


def layer() -> PackedSDPA:
    config = SimpleNamespace(
        kv_channels=D,
        attention_dropout=0.0,
        context_parallel_size=1,
        cp_comm_type=None,
        window_size=None,
        softmax_type="vanilla",
    )
    return PackedSDPA(config, 1, AttnMaskType.causal, "self")


def chain_rows(*, keeps_gradients: bool) -> list[PlacedRow]:
    batch = SampleBatch([list(range(n)) for n in LENGTHS])
    rows = []
    for piece in PIECES:
        samples = (0, 1) if piece == PIECES[1] else (0,)
        tokens = piece[1] - piece[0] + (LENGTHS[1] if len(samples) > 1 else 0)
        micro_batch = MicroBatch(samples, tokens, tokens, 0, tokens, pieces=(Part(0, *piece),))
        rows.append(pack_row(batch, micro_batch, Layout()))
    links = link_rows(rows, keeps_gradients=keeps_gradients)
    return [
        PlacedRow.of(row, params=row_params(row, link=link), link=link)
        for row, link in zip(rows, links, strict=True)
    ]


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(LENGTHS), heads, D) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def row_indices(row: PlacedRow) -> Tensor:
    """Where the row's tokens are among those of all samples."""
    indices = torch.full((row.row_tokens,), -1)
    held = row.positions_N >= 0
    indices[row.positions_N[held]] = torch.arange(sum(row.lengths))[held]
    return indices


def whole() -> tuple[Tensor, list[Tensor]]:
    """Outputs of whole samples, and gradients of queries, keys and values."""
    inputs = tensors()
    out = sample_attention(*inputs, LENGTHS, SCALE)
    (out * weights()).sum().backward()
    return out.detach(), [x.grad for x in inputs if x.grad is not None]


def weights() -> Tensor:
    return torch.linspace(-1, 1, sum(LENGTHS) * HEADS * D).reshape(-1, HEADS, D)


def in_pieces(forward: Forward | None = None) -> tuple[Tensor, list[Tensor], list[PlacedRow]]:
    """As `whole`, with forwards in order and backwards in reverse; and the rows."""
    core = layer()
    rows = chain_rows(keeps_gradients=True)
    inputs = tensors()
    out = torch.zeros(sum(LENGTHS), HEADS, D)
    losses = []
    for row in rows:
        indices = row_indices(row)

        def run(*qkv: Tensor, row: PlacedRow = row) -> Tensor:
            return core(*qkv, packed_seq_params=row.params).unflatten(1, (HEADS, D))

        # Times 1: between a piece's inputs and its keys is a graph, as in a model.
        qkv = [x[indices] * 1.0 for x in inputs]
        own = run(*qkv) if forward is None else forward(run, *qkv)
        out[indices] = own.detach()
        losses.append((own * weights()[indices]).sum())
    for loss in reversed(losses):
        loss.backward()
    return out, [x.grad for x in inputs if x.grad is not None], rows


def kept(row: PlacedRow) -> list[int]:
    """The pieces whose keys the chain of a row keeps, over all layers."""
    assert row.link is not None
    return [index for leaves in row.link.chain.kept.values() for index in leaves]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


def test_outputs_and_gradients_are_those_of_the_whole_sample() -> None:
    out, grads, rows = in_pieces()
    expected, expected_grads = whole()
    assert_equal([out, *grads], [expected, *expected_grads])
    # Backwards have freed all keys.
    assert kept(rows[0]) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_second_forward_finds_what_was_kept(*, reentrant: bool) -> None:
    def recomputed(run: Forward, *qkv: Tensor) -> Tensor:
        out: Tensor = checkpoint(run, *qkv, use_reentrant=reentrant)
        return out

    out, grads, rows = in_pieces(recomputed)
    expected, expected_grads = whole()
    assert_equal([out, *grads], [expected, *expected_grads])
    assert kept(rows[0]) == []


def test_gradients_of_later_pieces_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "_leaf", lambda value, link: value.detach().clone())
    _, grads, _ = in_pieces()
    _, expected = whole()
    torch.testing.assert_close(grads[0], expected[0], atol=2e-6, rtol=1e-5)
    assert (grads[1] - expected[1]).abs().max() > 0.1
    assert (grads[2] - expected[2]).abs().max() > 0.1


def test_a_forward_pass_frees_keys_after_the_last_piece() -> None:
    core = layer()
    rows = chain_rows(keeps_gradients=False)
    inputs = [x.detach() for x in tensors()]
    counts = []
    with torch.no_grad():
        for row in rows:
            qkv = [x[row_indices(row)] for x in inputs]
            core(*qkv, packed_seq_params=row.params)
            counts.append(len(kept(row)))
    assert counts == [1, 2, 0]


def test_positions_of_a_row_begin_at_its_piece() -> None:
    row = row_view(chain_rows(keeps_gradients=True)[1].params)
    assert row.positions_T is not None
    assert row.positions_T.tolist() == [8, 9, 10, 11, 0, 1, 2, 3, 4, 5]
    assert row.carried == (8,)


def piece_branch(tokens: int) -> Branch:
    return Branch(start=0, tokens=tokens, offset=9, parent=EARLIER, samples=(0,), end=tokens)


def test_transformer_engine_gets_the_lengths_of_queries_and_keys() -> None:
    ends = torch.tensor([0, 4, 10], dtype=torch.int32)
    pieces = (Piece(continues=False, start=0, kept_tokens=8), Piece(True, 0, 0))
    link = Link(Chain(pieces, 1, keeps_gradients=True), 1, torch.tensor([0]))
    row = RowView(ends, 12, lengths=[4, 6], branches=(piece_branch(4),), link=link)
    gathered = gathered_params(packed_seq_params(ends, 12, 10), row.paths())
    assert gathered.cu_seqlens_q.tolist() == [0, 4, 10]
    assert gathered.cu_seqlens_kv.tolist() == [0, 12, 18]
    assert row.paths().order_K.tolist() == list(range(18))
