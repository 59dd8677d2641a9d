"""Convolution and scan of a row give what each path gives token by token, with its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megapack.model.recurrent.scan import CHUNK_TOKENS, scan_in_chunks
from megapack.model.recurrent.segments import Segments
from megapack.prefixes import EARLIER
from tests.recurrent_rows import Kind, Layer, error, segments_of

pytestmark = pytest.mark.unit

KINDS: list[Kind] = ["delta_rule", "state_space"]
TOLERANCE = 1e-12

ROWS = {
    "whole samples": segments_of([5, 1, 9, 2], [-1, -1, -1]),
    "more than a chunk": segments_of([CHUNK_TOKENS + 3, 2, CHUNK_TOKENS], [-1, 0, 0]),
    "chunks of some": segments_of([5, 2 * CHUNK_TOKENS + 3, 2, CHUNK_TOKENS + 1], [-1, -1, 0]),
    "depth 3": segments_of([3, 1, 2, 6, 1, 2, 4, 3], [-1, 0, 1, 1, 0, 4, -1]),
    "kept leaf": segments_of([2, 1, 1, 5], [-1, 0, 1, -1], kept=2),
    "kept prefix": segments_of([2, 3, 1], [-1, 0, 0], kept=0),
    "continued": segments_of([1, 1, 2, 4, 3], [EARLIER, 0, 0, -1], kept=1),
    "continued by a whole row": segments_of([6], [EARLIER]),
}


def off(layer: Layer, segments: Segments) -> float:
    return error(layer, segments, layer.run, layer.token_by_token)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_its_paths_token_by_token(kind: Kind, row: str) -> None:
    assert off(Layer(kind), ROWS[row]) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 4])
def test_heads_share_keys_and_groups(kind: Kind, groups: int) -> None:
    assert off(Layer(kind, groups=groups), ROWS["depth 3"]) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_leaves_a_state_and_a_tail(kind: Kind) -> None:
    layer = Layer(kind)
    segments = ROWS["kept leaf"]
    _, state, tail = layer.run(layer.tensors(9), segments, None)
    wanted = layer.carried()
    assert state is not None
    assert tail is not None
    assert [state.shape, tail.shape] == [values.shape for values in wanted]
    nothing = layer.run(layer.tensors(9), segments_of([9], []), None)
    assert nothing[1:] == (None, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_in_fp32(kind: Kind, dtype: torch.dtype) -> None:
    layer = Layer(kind)
    tensors = [values.detach().to(dtype) for values in layer.tensors(9)]
    # Decays are in fp32 as the layers give them.
    tensors[1:3] = [values.float() for values in tensors[1:3]]
    tensors[5] = tensors[5].float()
    out, state, tail = layer.run(tensors, ROWS["kept leaf"], None)
    assert state is not None
    assert tail is not None
    assert (out.dtype, state.dtype, tail.dtype) == (dtype, torch.float32, dtype)


def test_a_long_segment_does_not_pad_the_others() -> None:
    (level,) = segments_of([2, 2 * CHUNK_TOKENS + 3, CHUNK_TOKENS], []).levels
    shapes = []

    def chunk(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        (values,) = inputs
        shapes.append(values.shape[:3])
        return values, state + values.sum(dim=2)

    values = torch.arange(sum(level.lengths)).view(-1, 1, 1)
    out, ends = scan_in_chunks(chunk, [values], level, values.new_zeros(3, 1, 1))
    assert shapes == [(3, 1, CHUNK_TOKENS), (1, 1, CHUNK_TOKENS), (1, 1, 3)]
    assert torch.equal(out, values)
    assert ends.flatten().tolist() == [int(x.sum()) for x in values.split(list(level.lengths))]


@st.composite
def trees(draw: st.DrawFn) -> Segments:
    """Any forest of short segments, of which any may be continued by later rows."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    parents = [draw(st.sampled_from([-1, EARLIER, *range(k)])) for k in range(len(lengths))]
    kept = draw(st.sampled_from([None, *range(len(lengths))]))
    return segments_of(lengths, parents, kept)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(segments=trees())
def test_any_forest(kind: Kind, segments: Segments) -> None:
    assert off(Layer(kind), segments) < TOLERANCE
