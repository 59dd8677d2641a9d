"""A sample in pieces, in rows of their own, gives what the whole sample gives token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megapack.model.carried import earlier, leave
from megapack.model.recurrent.segments import Segments
from megapack.prefixes import EARLIER
from megapack.rows.chain import Chain, Link, Piece
from tests.recurrent_rows import Kind, Layer, largest_error, segments_of, with_gradients

pytestmark = pytest.mark.unit

KINDS: list[Kind] = ["delta_rule", "state_space"]

# Of one sample 2 tokens, then 1 and 4 tokens as two branches, then 1, which is less than the
# convolution's reach, then 6; and two other samples, of 5 and of 2 tokens.
ROWS = [
    segments_of([2, 5], [-1, -1], kept=0),
    segments_of([1, 4], [EARLIER, 0], kept=1),
    segments_of([1], [EARLIER], kept=0),
    segments_of([6, 2], [EARLIER, -1]),
]
PIECES = (Piece(False, 0, 2), Piece(True, 0, 5), Piece(True, 0, 1), Piece(True, 0, 0))
# The same tokens as one row.
WHOLE = segments_of([2, 5, 1, 4, 1, 6, 2], [-1, -1, 0, 2, 3, 4, -1])

Run = Callable[..., Any]


def links(*, keeps_gradients: bool) -> list[Link]:
    chain = Chain(PIECES, 1, keeps_gradients)
    return [Link(chain, k, torch.zeros(1, dtype=torch.int64)) for k in range(len(PIECES))]


def row(layer: Layer, tensors: list[Tensor], segments: Segments, link: Link) -> Tensor:
    """As the forward of a layer."""
    before = earlier(link, layer)
    out, *left = layer.run(tensors, segments, before[-1] if before else None)
    return leave(link, layer, out, tuple(left))


def plainly(function: Run, *args: Any) -> Any:
    return function(*args)


def recomputed(function: Run, layer: Layer, tensors: list[Tensor], *rest: Any) -> Any:
    def run(*given: Tensor) -> Any:
        return function(layer, list(given), *rest)

    return checkpoint(run, *tensors, use_reentrant=True)


@pytest.mark.parametrize("run", [plainly, recomputed])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_in_four_rows_are_the_whole_sample(kind: Kind, run: Run) -> None:
    layer = Layer(kind)
    tokens = [sum(segments.lengths) for segments in ROWS]
    tensors = layer.tensors(sum(tokens))
    wanted = with_gradients(layer.token_by_token(tensors, WHOLE, None)[:1], tensors)
    outs = []
    places = links(keeps_gradients=True)
    # Each row's own tokens, so that a row's backward ends at them.
    inputs = list(zip(*(values.split(tokens) for values in tensors[:3]), strict=True))
    for own, segments, link in zip(inputs, ROWS, places, strict=True):
        outs.append(run(row, layer, [*own, *tensors[3:]], segments, link))
    weights = torch.linspace(-1, 1, wanted[0].numel(), dtype=torch.float64).mul(9).sin()
    parts = weights.view_as(wanted[0]).split(tokens)
    for out, part in reversed(list(zip(outs, parts, strict=True))):
        (out * part).sum().backward()
    # Mamba-2 does not read the rates.
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]
    found = [torch.cat(outs).detach(), *gradients]
    assert largest_error(found, wanted) < 1e-12
    assert places[0].kept(layer) == {}


def test_a_row_keeps_copies_that_later_rows_find() -> None:
    layer = Layer("delta_rule")
    places = links(keeps_gradients=True)
    row(layer, layer.tensors(7), ROWS[0], places[0])
    assert earlier(places[0], layer) == []
    (left,) = earlier(places[1], layer)
    assert [values.is_leaf and values.requires_grad for values in left] == [True, True]
    # A second forward of the row, to recompute it, keeps the first one's.
    row(layer, layer.tensors(7), ROWS[0], places[0])
    (again,) = earlier(places[1], layer)
    assert again[0] is left[0]


def test_without_gradients_the_last_row_frees_what_was_kept() -> None:
    layer = Layer("state_space")
    places = links(keeps_gradients=False)
    whole = layer.token_by_token(layer.tensors(21), WHOLE, None)[0]
    outs = []
    with torch.no_grad():
        tensors = layer.tensors(21)
        tokens = [sum(segments.lengths) for segments in ROWS]
        inputs = list(zip(*(values.split(tokens) for values in tensors[:3]), strict=True))
        for own, segments, link in zip(inputs, ROWS, places, strict=True):
            assert len(link.kept(layer)) == link.index
            outs.append(row(layer, [*own, *tensors[3:]], segments, link))
    assert largest_error([torch.cat(outs)], [whole.detach()]) < 1e-12
    assert places[-1].kept(layer) == {}
