"""Attention whose scores are capped, against a softmax of all scores of a sample at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megapack.model.attention import chunked
from megapack.model.attention.capped import capped_attention
from megapack.model.attention.paths import key_paths

pytestmark = pytest.mark.unit

LENGTHS = [7, 1, 20]
HEADS, GROUPS, WIDTH, VALUES = 4, 2, 8, 6
CAP, SCALE = 1.5, 0.4


def whole(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """One sample, head by head."""
    count = len(query)
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    heads = []
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        scores = CAP * torch.tanh(query[:, head] @ key[:, group].T * SCALE / CAP)
        heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value[:, group])
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunk_scores", [1 << 24, 1 << 7])
def test_values_and_gradients(
    window: int | None, chunk_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_CHUNK_SCORES", chunk_scores)
    generator = torch.Generator().manual_seed(2)
    tokens = sum(LENGTHS)
    sizes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUES), (HEADS, VALUES))
    query, key, value, factors = (
        2 * torch.randn(tokens, *size, generator=generator, dtype=torch.float64) for size in sizes
    )
    inputs = [x.requires_grad_() for x in (query, key, value)]
    made = key_paths(LENGTHS, (), window=window, max_queries=window)
    gathered = (x.index_select(0, made.order_K) for x in (key, value))
    out = capped_attention(query, *gathered, made, cap=CAP, scale=SCALE, window=window)
    samples = [x.split(LENGTHS) for x in inputs]
    expected = torch.cat([whole(*own, window) for own in zip(*samples, strict=True)])
    torch.testing.assert_close(out, expected)
    got = torch.autograd.grad((out * factors).sum(), inputs)
    torch.testing.assert_close(got, torch.autograd.grad((expected * factors).sum(), inputs))
