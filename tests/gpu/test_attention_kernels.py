"""GPU attention kernels against per-sample SDPA."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megapack import Layout, SharedPrefixes
from megapack.model.attention.choice import obstacle
from megapack.model.attention.packed import PackedAttention, packed_seq_params
from megapack.model.attention.paths import key_paths
from megapack.model.attention.row import RowView, row_view, with_view
from megapack.model.attention.sdpa import PackedSDPA
from megapack.model.attention.te_rows import gathered_params, hook_te_attention
from megapack.model.attention.varlen import PackedVarlen, varlen_causal_attention
from megapack.prefixes import Branch, PrefixTable, row_branches
from megapack.rows.slices import slice_positions
from megapack.rows.transfer import moved
from tests.forests import Forest, masked_attention
from tests.packed_attention import sample_attention
from tools.benching.gpu_kernels import te_arguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

HEADS, GROUPS, D = 8, 2, 64
LENGTHS = [64, 8, 200, 8, 512]
SCALE = D**-0.5


def qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(LENGTHS), heads, D) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator).cuda().bfloat16() for shape in shapes]


def cu_seqlens() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sample_attention(q.double(), k.double(), v.double(), LENGTHS, SCALE)


def skip_without(kernel: str) -> None:
    reason = obstacle(kernel)  # type: ignore[arg-type]
    if reason is not None:
        pytest.skip(reason)


def test_varlen_equals_sdpa_with_its_gradients() -> None:
    skip_without("varlen")
    config = SimpleNamespace(attention_dropout=0.0, kv_channels=D, context_parallel_size=1)
    module = PackedVarlen(config, 1, AttnMaskType.causal, "self")
    row = packed_seq_params(cu_seqlens(), max(LENGTHS), sum(LENGTHS))
    found, wanted = [x.requires_grad_() for x in qkv()], [x.requires_grad_() for x in qkv()]
    out, expected = module.attend(*found, row_view(row)), reference(*wanted)
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)
    for one, total in ((out, weights), (expected, weights)):
        (one.double() * total).sum().backward()
    for x, y in zip(found, wanted, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad - y.grad).norm() < 0.02 * y.grad.norm()


def test_causal_varlen_aligns_queries_to_the_end_of_keys() -> None:
    """Slices of context parallelism rely on this alignment."""
    skip_without("varlen")
    q, k, v = qkv()
    whole = reference(q, k, v)
    cp = 2
    slices = [slice_positions(LENGTHS, cp, rank).cuda() for rank in range(cp)]
    all_slices = torch.cat(slices)
    for rank, mine in enumerate(slices):
        paths = moved(key_paths(LENGTHS, (), cp=cp, cp_rank=rank), "cuda")
        keys = all_slices[paths.order_K]
        longest = max(paths.num_queries), max(paths.num_keys)
        ends = (paths.query_ends, paths.key_ends, *longest)
        out = varlen_causal_attention(q[mine], k[keys], v[keys], *ends, SCALE)
        torch.testing.assert_close(out.double(), whole[mine], atol=0.02, rtol=0.02)


def test_te_equals_sdpa_without_device_synchronization() -> None:
    skip_without("te")
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(
        HEADS, D, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format="thd"
    )
    q, k, v = qkv()
    row = packed_seq_params(cu_seqlens(), max(LENGTHS), sum(LENGTHS))
    given = te_arguments(row, "padding_causal")
    expected = reference(q, k, v).flatten(1)
    for mode in ("default", "error"):  # The first call selects a kernel and may synchronize.
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = module(q, k, v, **given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("cp", [2, 4])
def test_slices_equal_transformer_engines_partition(cp: int) -> None:
    skip_without("te")
    import transformer_engine_torch as tex

    total = sum(LENGTHS)
    for rank in range(cp):
        theirs = tex.thd_get_partitioned_indices(cu_seqlens(), total, cp, rank)
        assert theirs.tolist() == slice_positions(LENGTHS, cp, rank).tolist()


# A prompt of 65 tokens with three answers, and a sample by itself.
SHARED = SharedPrefixes((0, 1, 2), (0, 65, 65))
SHARED_LENGTHS = [100, 72, 265, 40]


def shared_row() -> tuple[PackedSeqParams, list[Branch], list[Tensor]]:
    """A row whose first three samples share 64 positions, and its queries, keys and values."""
    table = PrefixTable(SHARED, SHARED_LENGTHS, Layout())
    branches = row_branches(range(4), SHARED_LENGTHS, Layout(), table)
    spans = [branch.tokens for branch in branches]
    total = sum(spans)
    ends = torch.tensor([0, *spans]).cumsum(0).int().cuda()
    params = packed_seq_params(ends, 265, total)
    row = with_view(params, RowView(ends, 265, spans, branches=tuple(branches)))
    generator = torch.Generator().manual_seed(2)
    shapes = [(total, heads, D) for heads in (HEADS, GROUPS, GROUPS)]
    return row, branches, [torch.randn(s, generator=generator).cuda().bfloat16() for s in shapes]


def masked_on_the_cpu(branches: list[Branch], tensors: list[Tensor]) -> Tensor:
    row = Forest(tuple(branches), tuple(branch.tokens for branch in branches))
    return masked_attention(*tensors, row.mask_TT, SCALE)


def test_varlen_with_shared_prefixes_equals_a_mask_with_its_gradients() -> None:
    skip_without("varlen")
    config = SimpleNamespace(attention_dropout=0.0, kv_channels=D, context_parallel_size=1)
    module = PackedVarlen(config, 1, AttnMaskType.causal, "self")
    row, branches, tensors = shared_row()
    wanted = [x.detach().cpu().double().requires_grad_() for x in tensors]
    expected = masked_on_the_cpu(branches, wanted)
    out = module.attend(*(x.requires_grad_() for x in tensors), row_view(row))
    torch.testing.assert_close(out.cpu().double(), expected.detach(), atol=0.02, rtol=0.02)
    expected.sum().backward()
    out.float().sum().backward()
    for x, y in zip(tensors, wanted, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad.cpu() - y.grad).norm() < 0.02 * y.grad.norm()


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_varlen_with_windows_and_sinks_equals_sdpa(window: int | None, softmax_type: str) -> None:
    config = SimpleNamespace(
        attention_dropout=0.0,
        kv_channels=D,
        num_attention_heads=HEADS,
        context_parallel_size=1,
        tensor_model_parallel_size=1,
        window_size=None if window is None else (window - 1, 0),
        softmax_type=softmax_type,
        params_dtype=torch.float32,
        use_cpu_initialization=False,
    )
    grads = []
    for kind, cast in ((PackedVarlen, torch.Tensor.bfloat16), (PackedSDPA, torch.Tensor.double)):
        module = kind(config, 1, AttnMaskType.causal, "self")
        inputs = [cast(x).requires_grad_() for x in qkv()]
        if module.softmax_offset is not None:
            with torch.no_grad():
                module.softmax_offset.copy_(torch.linspace(-2, 2, HEADS))
            inputs.append(module.softmax_offset)
        row = packed_seq_params(cu_seqlens(), max(LENGTHS), sum(LENGTHS))
        out = module.attend(*inputs[:3], row_view(row))
        weights = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).sin()
        found = torch.autograd.grad((out * weights).sum(), inputs)
        grads.append([out.detach().double(), *(x.double() for x in found)])
    for x, y in zip(*grads, strict=True):
        assert (x - y).norm() < 0.02 * y.norm()


def test_te_with_shared_prefixes_equals_merged_calls() -> None:
    skip_without("te")
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(
        HEADS, D, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format="thd"
    )
    row, branches, (q, k, v) = shared_row()
    view = row_view(row)
    order_K = view.paths().order_K
    given = te_arguments(gathered_params(row, view.paths()), "padding_causal_bottom_right")
    out = module(q, k[order_K], v[order_K], **given)
    expected = masked_on_the_cpu(branches, [x.cpu().double() for x in (q, k, v)]).flatten(1)
    torch.testing.assert_close(out.cpu().double(), expected.detach(), atol=0.02, rtol=0.02)


def test_te_rotates_a_row_by_its_gathered_table_without_synchronization() -> None:
    skip_without("te")
    from megatron.core.models.common.embeddings import rope_utils

    positions_T = torch.cat([torch.arange(n) for n in LENGTHS]).cuda()
    angles = torch.outer(torch.arange(max(LENGTHS)), 10000.0 ** -(torch.arange(0, D, 2) / D))
    table = torch.cat([angles, angles], dim=-1).float().cuda()
    query = qkv()[0][:, None]
    torch.cuda.set_sync_debug_mode("error")
    try:
        row_table = table.index_select(0, positions_T)[:, None, None]
        found = rope_utils.fused_apply_rotary_pos_emb(query, row_table)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = rope_utils._apply_rotary_pos_emb_bshd(query.double(), row_table.double())
    torch.testing.assert_close(found.double(), wanted, atol=0.02, rtol=0.02)


class RowGroup:
    """Ranks that share a row; one GPU has only one of them at a time."""

    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize("kernel", [PackedVarlen, PackedSDPA])
@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_of_a_row_over_several_ranks_equal_the_whole_row(
    kernel: type[PackedAttention], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer has no context parallelism of its own: the row names the ranks that share it."""
    if kernel is PackedVarlen:
        skip_without("varlen")
    config = SimpleNamespace(attention_dropout=0.0, kv_channels=D, context_parallel_size=1)
    module = kernel(config, 1, AttnMaskType.causal, "self")
    given = [x.requires_grad_() for x in qkv()]
    wanted = [x.detach().requires_grad_() for x in given]
    slices = [slice_positions(LENGTHS, ranks, rank).cuda() for rank in range(ranks)]
    all_slices = torch.cat(slices)
    _, key, value = given

    def gathered(_: Tensor, __: Tensor, order_K: Tensor, group: RowGroup) -> tuple[Tensor, Tensor]:
        assert group.size() == ranks
        return key[all_slices][order_K], value[all_slices][order_K]

    monkeypatch.setattr(sys.modules[kernel.__module__], "gather_rows", gathered)
    expected = reference(*wanted)
    weights = torch.linspace(-1, 1, expected.numel(), device="cuda").view_as(expected)
    for rank, mine in enumerate(slices):
        row = RowView(cu_seqlens(), max(LENGTHS), LENGTHS, cp_group=RowGroup(ranks, rank))
        out = module.attend(*(x[mine] for x in given), row)
        torch.testing.assert_close(out.double(), expected[mine], atol=0.02, rtol=0.02)
        (out.double() * weights[mine]).sum().backward()
    (expected * weights).sum().backward()
    for x, y in zip(given, wanted, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad - y.grad).norm() < 0.02 * y.grad.norm()


def te_core(**settings: Any) -> tuple[Any, TransformerConfig]:
    """Megatron's wrapper of Transformer Engine's attention, which runs all kinds of rows."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * D,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=D,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        **settings,
    )
    groups = SimpleNamespace(tp=None, cp=None)
    core = TEDotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    hook_te_attention([torch.nn.ModuleList([core])])
    return core, config


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_a_te_layer_with_windows_shares_prefixes_as_sdpa_does(softmax_type: str) -> None:
    """In varlen attention, which the layer calls."""
    skip_without("te")
    skip_without("varlen")
    core, config = te_core(window_size=(15, 0), softmax_type=softmax_type)
    plain = PackedSDPA(config, 1, AttnMaskType.causal, "self")
    row, _, tensors = shared_row()
    found, wanted = (
        [cast(x).requires_grad_() for x in tensors]
        for cast in (torch.Tensor.clone, torch.Tensor.double)
    )
    if softmax_type == "learnable":
        with torch.no_grad():
            core.softmax_offset.copy_(torch.linspace(-2, 2, HEADS))
        plain.softmax_offset = core.softmax_offset
        found.append(core.softmax_offset)
        wanted.append(core.softmax_offset)
    out = core(*found[:3], None, attn_mask_type=AttnMaskType.causal, packed_seq_params=row)
    expected = plain.attend(*wanted[:3], row_view(row)).flatten(1)
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).sin()
    pairs = [
        torch.autograd.grad((one * weights).sum(), inputs)
        for one, inputs in ((out, found), (expected, wanted))
    ]
    for x, y in zip(*pairs, strict=True):
        assert (x - y).norm() < 0.02 * y.norm()


def test_te_runs_a_row_of_one_rank_after_one_of_several() -> None:
    """Megatron's wrapper keeps the ranks of the last row that named some."""
    skip_without("te")
    core, _ = te_core()
    # What a row over two ranks leaves behind.
    core.set_context_parallel_group(RowGroup(2, 0), [0, 1], torch.cuda.Stream(), "p2p")
    core._follows_rows = True
    q, k, v = qkv()
    view = RowView(cu_seqlens(), max(LENGTHS), LENGTHS, cp_group=RowGroup(1, 0))
    alone = with_view(packed_seq_params(cu_seqlens(), max(LENGTHS), sum(LENGTHS)), view)
    out = core(q, k, v, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=alone)
    expected = reference(q, k, v).flatten(1)
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
