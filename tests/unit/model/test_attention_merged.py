"""Attention over shared prefixes in merged blocks equals attention with a mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megapack.layout import Layout
from megapack.model.attention import sdpa
from megapack.model.attention.merged import Block, attention_blocks, merged_attention
from megapack.model.attention.packed import row_params
from megapack.model.attention.row import row_view
from megapack.model.attention.sdpa import PackedSDPA
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
# Largest error relative to the largest number. fp32 keeps 24 bits (6e-8), bf16 8 bits (4e-3).
LIMITS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-2}


def blocks_of(row: Forest) -> list[Block]:
    return attention_blocks(row.spans, row.branches)


def cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.detach().to(dtype).requires_grad_() for x in tensors)


def compared(row: Forest, dtype: torch.dtype, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    q, k, v = cast(inputs, dtype)
    found = with_gradients(merged_attention(q, k, v, blocks_of(row), SCALE), (q, k, v))
    # The same rounded numbers, in float64.
    exact = cast((q, k, v), torch.float64)
    wanted = with_gradients(masked_attention(*exact, row.mask_TT, SCALE), exact)
    return error(found, wanted)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("depth", range(5))
def test_merged_blocks_equal_a_mask(depth: int, dtype: torch.dtype) -> None:
    for seed in range(4):
        row = random_forest(seed, depth=depth)
        inputs = row_tensors(row.tokens, HEADS, GROUPS, D, seed=seed)
        assert compared(row, dtype, inputs) < LIMITS[dtype]


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 1), (6, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_may_share_keys(heads: int, groups: int, dtype: torch.dtype) -> None:
    row = random_forest(7)
    assert compared(row, dtype, row_tensors(row.tokens, heads, groups, D)) < LIMITS[dtype]


@pytest.mark.parametrize(("width", "value_width"), [(8, 6), (24, 16), (5, 5), (64, 64)])
def test_heads_may_have_any_width(width: int, value_width: int) -> None:
    row = random_forest(8)
    inputs = row_tensors(row.tokens, HEADS, GROUPS, width, value_width)
    assert compared(row, torch.float32, inputs) < LIMITS[torch.float32]


def test_long_branches_are_exact() -> None:
    """Longer than the kernel's blocks of queries and keys."""
    prompt = list(range(700))
    row = forest([[*prompt, 1000 + k, *range(600 + 50 * k)] for k in range(3)])
    assert compared(row, torch.float32, row_tensors(row.tokens, 2, 1, 16)) < LIMITS[torch.float32]


def core() -> PackedSDPA:
    config = SimpleNamespace(attention_dropout=0.0, kv_channels=D, context_parallel_size=1)
    return PackedSDPA(config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE)


@pytest.mark.parametrize("cp", [2, 4])
def test_slices_attend_as_the_whole_row_does(cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        row = random_forest(seed, cp, depth=3)
        q, k, v = row_tensors(row.tokens, HEADS, GROUPS, D, seed=seed)
        whole = masked_attention(q, k, v, row.mask_TT, SCALE)
        weights = torch.linspace(-1, 1, q.numel(), dtype=q.dtype).view_as(q)
        wanted = torch.autograd.grad((whole * weights).sum(), (q, k, v))
        whole = whole.detach()
        slices = [slice_positions(row.spans, cp, rank) for rank in range(cp)]

        def gather(
            key: Tensor,
            value: Tensor,
            order_K: Tensor,
            group: Any,
            all_ranks: tuple[Tensor, Tensor] = (k[torch.cat(slices)], v[torch.cat(slices)]),
        ) -> tuple[Tensor, Tensor]:
            """Concatenated slices of all ranks, as the collective returns them."""
            return all_ranks[0][order_K], all_ranks[1][order_K]

        monkeypatch.setattr(sdpa, "gather_rows", gather)
        total = [torch.zeros_like(x) for x in (q, k, v)]
        for rank, mine in enumerate(slices):
            out = core().attend(q[mine], k[mine], v[mine], row.view(rank, cp))
            assert error([out.detach()], [whole[mine]]) < 1e-12
            grads = torch.autograd.grad((out * weights[mine]).sum(), (q, k, v), retain_graph=True)
            total = [a + b for a, b in zip(total, grads, strict=True)]
        # The queries of each rank contribute to the gradients of keys and values.
        assert error(total, list(wanted)) < 1e-12


def test_a_prefix_is_one_block_for_all_that_continues_it() -> None:
    row = forest([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7, 8]])
    starts_tokens_ends = [(b.start, b.tokens, b.end) for b in row.branches]
    assert starts_tokens_ends == [(0, 1, 10), (1, 2, 7), (3, 2, 5), (5, 2, 7), (7, 3, 10)]
    full = [block for block in blocks_of(row) if not block.causal]
    assert full == [Block(1, 9, 0, 1, causal=False), Block(3, 4, 1, 2, causal=False)]


def test_neighbours_of_one_length_are_one_batch() -> None:
    blocks = attention_blocks([5, 3, 3, 3, 2], ())
    assert [(p.first_query, p.num_queries, p.count) for p in blocks] == [
        *((0, 5, 1), (5, 3, 3), (14, 2, 1))
    ]


def test_layers_share_the_blocks_of_a_row() -> None:
    row = random_forest(1)
    params = row.params()
    assert row_view(params).blocks is row_view(params).blocks
    assert row_view(params).blocks == blocks_of(row)


def test_rows_that_share_nothing_keep_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "merged_attention", None)
    row = forest([[1, 2, 3], [4, 5]])
    q, k, v = row_tensors(row.tokens, HEADS, GROUPS, D)
    out = core().attend(q, k, v, Forest((), row.spans).view())
    wanted = masked_attention(q, k, v, row.mask_TT, SCALE)
    assert error([out.detach()], [wanted.detach()]) < 1e-12


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
