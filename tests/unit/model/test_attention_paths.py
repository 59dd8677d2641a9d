"""Attention over shared prefixes with gathered keys equals attention with a mask."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megapack.layout import Layout
from megapack.model.attention import paths as paths_module
from megapack.model.attention import sdpa, varlen
from megapack.model.attention.packed import row_params
from megapack.model.attention.paths import key_paths
from megapack.model.attention.row import row_view
from megapack.model.attention.sdpa import PackedSDPA
from megapack.model.attention.varlen import PackedVarlen
from megapack.plan import MicroBatch
from megapack.prefixes import Branch, PrefixTable, SharedPrefixes
from megapack.rows.packed import pack_row
from megapack.rows.slices import slice_positions
from megapack.samples import SampleBatch
from tests.forests import (
    Forest,
    error,
    forest,
    masked_attention,
    random_forest,
    row_tensors,
    with_gradients,
)

pytestmark = pytest.mark.unit

HEADS, GROUPS, D = 4, 2, 8
SCALE = 0.3

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """torch 2.12's varlen attention: the last query of a sequence sees its last key."""
    assert window_size == (-1, 0)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (cu_seq_q[-1], cu_seq_k[-1]) == (query.shape[0], key.shape[0])
    assert max_q >= int(cu_seq_q.diff().max())
    assert max_k >= int(cu_seq_k.diff().max())
    out = []
    for i in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[i] : cu_seq_q[i + 1]]
        k, v = (x[cu_seq_k[i] : cu_seq_k[i + 1]] for x in (key, value))
        seen = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
        out.append(masked_attention(q, k, v, seen, scale))
    return torch.cat(out)


def attend_of(name: str) -> Attend:
    config = SimpleNamespace(attention_dropout=0.0, kv_channels=D, context_parallel_size=1)
    kind = PackedVarlen if name == "varlen" else PackedSDPA
    module = kind(config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE)
    return module.attend


@pytest.fixture(autouse=True)
def replaced_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel needs CUDA."""
    monkeypatch.setattr(varlen, "varlen_kernel", lambda: kernel)


def wanted_of(row: Forest, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    return with_gradients(masked_attention(*inputs, row.mask_TT, SCALE), inputs)


@pytest.mark.parametrize("name", ["varlen", "sdpa"])
@pytest.mark.parametrize("depth", range(5))
def test_gathered_keys_equal_a_mask(name: str, depth: int) -> None:
    for seed in range(3):
        row = random_forest(seed, depth=depth)
        inputs = row_tensors(row.tokens, HEADS, GROUPS, D, seed=seed)
        found = with_gradients(attend_of(name)(*inputs, row.view()), inputs)
        assert error(found, wanted_of(row, inputs)) < 1e-12


@pytest.mark.parametrize("name", ["varlen", "sdpa"])
@pytest.mark.parametrize(("heads", "groups", "value_width"), [(4, 4, 8), (4, 1, 8), (2, 2, 5)])
def test_heads_may_differ(name: str, heads: int, groups: int, value_width: int) -> None:
    row = random_forest(3)
    inputs = row_tensors(row.tokens, heads, groups, D, value_width)
    found = with_gradients(attend_of(name)(*inputs, row.view()), inputs)
    assert error(found, wanted_of(row, inputs)) < 1e-12


@pytest.mark.parametrize("name", ["varlen", "sdpa"])
@pytest.mark.parametrize("cp", [2, 4])
def test_slices_attend_as_the_whole_row_does(
    name: str, cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = random_forest(5, cp, depth=3)
    q, k, v = row_tensors(row.tokens, HEADS, GROUPS, D)
    whole, *wanted = wanted_of(row, (q, k, v))
    weights = torch.linspace(-1, 1, q.numel(), dtype=q.dtype).view_as(q).sin()
    slices = [slice_positions(row.spans, cp, rank) for rank in range(cp)]

    def gather(key: Tensor, value: Tensor, order_K: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        """Concatenated slices of all ranks, as the collective returns them."""
        return k[torch.cat(slices)][order_K], v[torch.cat(slices)][order_K]

    monkeypatch.setattr(sdpa, "gather_rows", gather)
    monkeypatch.setattr(varlen, "gather_rows", gather)
    total = [torch.zeros_like(x) for x in (q, k, v)]
    for rank, mine in enumerate(slices):
        out = attend_of(name)(q[mine], k[mine], v[mine], row.view(rank, cp))
        assert error([out.detach()], [whole[mine]]) < 1e-12
        grads = torch.autograd.grad((out * weights[mine]).sum(), (q, k, v))
        total = [a + b for a, b in zip(total, grads, strict=True)]
    assert error(total, wanted) < 1e-12


def test_doctests_of_the_module() -> None:
    result = doctest.testmod(paths_module)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_key_is_gathered_once_per_path() -> None:
    row = forest([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7, 8]])
    paths = key_paths(row.spans, row.branches)
    assert paths.num_queries == [1, 2, 2, 2, 3, *row.spans[5:]]
    assert paths.num_keys == [1, 3, 5, 5, 4, *row.spans[5:]]
    keys = [own.tolist() for own in paths.order_K.split(paths.num_keys)]
    assert keys[:5] == [[0], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 7, 8, 9]]


def test_layers_share_the_paths_of_a_row() -> None:
    params = random_forest(1).params()
    assert row_view(params).paths() is row_view(params).paths()


def test_the_description_of_a_row_has_branches_only_if_samples_share() -> None:
    batch = SampleBatch([[1, 2, 3, 4], [1, 2, 3, 5, 6]])
    table = PrefixTable(SharedPrefixes.from_samples([[1, 2, 3, 4], [1, 2, 3, 5, 6]]), 2, Layout())

    def branches(row_tokens: int, prefixes: PrefixTable | None) -> tuple[Branch, ...]:
        micro_batch = MicroBatch(
            (0, 1), row_tokens=row_tokens, tokens=9, tokens_sq=41, padded_tokens=row_tokens
        )
        row = pack_row(batch, micro_batch, Layout(), prefixes=prefixes)
        return row_view(row_params(row)).branches

    assert branches(9, None) == ()
    assert [branch.tokens for branch in branches(7, table)] == [2, 2, 3]
