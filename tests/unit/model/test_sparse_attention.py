"""Sparse attention against dense attention with a mask, in fp64, one query at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megapack.model.attention.paths import Paths, key_paths
from megapack.model.attention.sparse import Index, IndexerLoss, chosen_keys, sparse_attention
from megapack.prefixes import EARLIER, Branch

HEADS, WIDTH, VALUE_WIDTH = 3, 4, 5
INDEX_HEADS, INDEX_WIDTH = 6, 4
SCALE = 0.7
COEF = 0.3


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    index_query: Tensor
    index_weight: Tensor
    index_key: Tensor


def branch(start: int, tokens: int, parent: int, end: int) -> Branch:
    return Branch(start=start, tokens=tokens, offset=0, parent=parent, samples=(0,), end=end)


# Lengths, branches, tokens of earlier rows. The second: a prefix of 7 tokens with two answers, and
# a sample; the third: a piece after 9 tokens, and a sample.
ROWS: dict[str, tuple[list[int], list[Branch], list[int]]] = {
    "samples": ([9, 1, 5, 14], [], []),
    "prefixes": (
        [7, 6, 3, 8],
        [branch(0, 7, -1, 16), branch(7, 6, 0, 13), branch(13, 3, 0, 16), branch(16, 8, -1, 24)],
        [],
    ),
    "pieces": ([6, 4], [branch(0, 6, EARLIER, 6), branch(6, 4, -1, 10)], [4, 5]),
}


def inputs(num_queries: int, num_keys: int) -> Inputs:
    generator = torch.Generator().manual_seed(3)
    shapes = (
        (num_queries, HEADS, WIDTH),
        (num_keys, HEADS, WIDTH),
        (num_keys, HEADS, VALUE_WIDTH),
        (num_queries, INDEX_HEADS, INDEX_WIDTH),
        (num_queries, INDEX_HEADS),
        (num_keys, INDEX_WIDTH),
    )
    tensors = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    )
    return Inputs(*tensors)


def dense(
    given: Inputs, paths: Paths, top_k: int, copies: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """The outputs, and the loss times its factor; queries one after the other."""
    outputs = []
    losses = []
    query = key_end = 0
    for num_queries, num_keys in zip(paths.num_queries, paths.num_keys, strict=True):
        key_end += num_keys
        for i in range(num_queries):
            keys = torch.arange(key_end - num_keys, key_end - num_queries + i + 1)
            products = torch.einsum(
                "ic,kc->ik", given.index_query[query], given.index_key[keys]
            ).clamp(min=0)
            scores = given.index_weight[query] @ products
            best = scores.sort(descending=True, stable=True).indices[:top_k]
            logits = torch.einsum("hd,khd->hk", given.query[query], given.key[keys[best]]) * SCALE
            probs = logits.softmax(-1)
            outputs.append(torch.einsum("hk,khv->hv", probs, given.value[keys[best]]))
            target = probs.detach().mean(0)
            kl = (target * (target.log() - scores[best].log_softmax(-1))).sum()
            losses.append(copies[query] * kl)
            query += 1
    return torch.stack(outputs), factor * torch.stack(losses).sum()


def results(row: str, top_k: int, *, with_loss: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """Output, loss and gradients: of sparse attention, and of the dense one."""
    lengths, branches, carried = ROWS[row]
    paths = key_paths(lengths, branches, carried=carried)
    num_queries = sum(lengths)
    copies = torch.arange(num_queries) % 3
    found = []
    for is_sparse in (True, False):
        given = inputs(num_queries, num_queries + sum(carried))
        own = [given.key, given.value, given.index_key]
        key, value, index_key = (x.index_select(0, paths.order_K) for x in own)
        gathered = given._replace(key=key, value=value, index_key=index_key)
        if is_sparse:
            loss = IndexerLoss(copies_Q=copies, factor=COEF) if with_loss else None
            index = Index(given.index_query, given.index_weight, index_key)
            out, loss_sum = sparse_attention(
                given.query, key, value, index, paths, top_k=top_k, scale=SCALE, loss=loss
            )
            shown = torch.zeros(()) if loss_sum is None else COEF * loss_sum
            total = out.square().sum()
        else:
            out, shown = dense(gathered, paths, top_k, copies, COEF if with_loss else 0.0)
            total = out.square().sum() + shown
        total.backward()
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in given]
        found.append([out.detach(), shown.detach().double(), *grads])
    return found[0], found[1]


def errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return max(
        float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("chunk_scores", [1, 100, 1 << 24])
@pytest.mark.parametrize("row", ROWS)
def test_output_loss_and_gradients_equal_dense_attention(
    row: str, chunk_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megapack.model.attention.chunked._CHUNK_SCORES", chunk_scores)
    got, want = results(row, top_k=3)
    assert errors(got, want) < 1e-12
    assert want[1] > 0.1
    assert all(gradient.norm() > 0.1 for gradient in want[2:])


def test_without_a_loss_the_index_has_no_gradient() -> None:
    got, want = results("samples", top_k=3, with_loss=False)
    assert errors(got, want) < 1e-12
    assert all(gradient.norm() == 0 for gradient in got[5:])


def test_of_equal_scores_the_first_keys_are_chosen() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 1.0], [0.0] * 5, [-1.0, -torch.inf, 0.0, 3.0, 3.0]])
    visible = torch.tensor([[True] * 5, [True, True, False, False, False], [True] * 4 + [False]])
    chosen = chosen_keys(scores, visible, top_k=3)
    assert chosen.tolist() == [
        [True, True, False, False, True],
        [True, True, False, False, False],
        [True, False, True, True, False],
    ]


def test_memory_of_scores_is_that_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor that autograd keeps grows with queries times keys."""
    monkeypatch.setattr("megapack.model.attention.chunked._CHUNK_SCORES", 1000)
    paths = key_paths([64], [])
    given = inputs(64, 64)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    index = Index(given.index_query, given.index_weight, given.index_key)
    loss = IndexerLoss(copies_Q=torch.ones(64), factor=1.0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sparse_attention(
            given.query, given.key, given.value, index, paths, top_k=4, scale=1.0, loss=loss
        )
    assert max(kept) <= 64 * INDEX_HEADS * INDEX_WIDTH
