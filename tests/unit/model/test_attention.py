"""Packed attention is causal, separates samples, and equals one sample at a time."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megapack.cost.sizes import FLASH_WIDTH
from megapack.errors import ConfigError, ScheduleError
from megapack.model.attention import packed
from megapack.model.attention.packed import (
    packed_seq_params,
    seqlen_bucket,
)
from megapack.model.attention.sdpa import PackedSDPA
from tests.packed_attention import packed_attention

pytestmark = pytest.mark.unit

HEADS, GROUPS, D = 4, 2, 8
LENGTHS = [5, 1, 7, 3, 3, 3, 1]
SCALE = 1 / math.sqrt(D)


def qkv(lengths: list[int], heads: int = HEADS, groups: int = GROUPS) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    shapes = [(total, heads, D), (total, groups, D), (total, groups, D)]
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def test_wide_heads_have_keys_of_their_own() -> None:
    """Above the width of fused attention keys are repeated, which changes no number."""
    width = FLASH_WIDTH + 8
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(9, heads, width, generator=generator) for heads in (4, 2, 2))
    found = packed_attention(q, k, v, [5, 4], 0.1)
    every = [packed_attention(*part, [5, 4], 0.1) for part in _by_query_head(q, k, v)]
    torch.testing.assert_close(found, torch.cat(every, dim=1), atol=1e-6, rtol=1e-5)


def _by_query_head(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, ...]]:
    groups = q.shape[1] // k.shape[1]
    heads = range(q.shape[1])
    return [(q[:, [h]], k[:, [h // groups]], v[:, [h // groups]]) for h in heads]


def config(**changes: Any) -> SimpleNamespace:
    values = {
        "attention_dropout": 0.0,
        "kv_channels": D,
        "context_parallel_size": 1,
        "window_size": None,
        "softmax_type": "vanilla",
    }
    return SimpleNamespace(**{**values, **changes})


def core(
    mask: AttnMaskType = AttnMaskType.causal, kind: str = "self", **changes: Any
) -> PackedSDPA:
    return PackedSDPA(config(**changes), 1, mask, kind)


def params(lengths: list[int]) -> PackedSeqParams:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return packed_seq_params(cu_seqlens, max(lengths), sum(lengths))


def test_the_module_flattens_heads_and_scales_by_the_head_size() -> None:
    q, k, v = qkv(LENGTHS)
    out = core()(q, k, v, packed_seq_params=params(LENGTHS))
    assert torch.equal(out, packed_attention(q, k, v, LENGTHS, SCALE).flatten(1))
    other = PackedSDPA(config(), 1, AttnMaskType.causal, "self", softmax_scale=0.5)
    assert torch.equal(
        other(q, k, v, packed_seq_params=params(LENGTHS)),
        packed_attention(q, k, v, LENGTHS, 0.5).flatten(1),
    )


def test_dropout_only_in_training() -> None:
    q, k, v = qkv([64])
    module = core(attention_dropout=0.5)
    exact = packed_attention(q, k, v, [64], SCALE).flatten(1)
    assert not torch.equal(module(q, k, v, packed_seq_params=params([64])), exact)
    module.eval()
    assert torch.equal(module(q, k, v, packed_seq_params=params([64])), exact)


@pytest.mark.parametrize(
    "given_params", [None, PackedSeqParams(), PackedSeqParams(qkv_format="sbhd")]
)
def test_a_row_that_is_not_packed_is_refused(given_params: PackedSeqParams | None) -> None:
    with pytest.raises(ScheduleError, match=r"without packed_seq_params.*every pipeline"):
        core()(*qkv([4]), packed_seq_params=given_params)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kind": "cross"}, "self attention only, not 'cross'"),
        ({"mask": AttnMaskType.no_mask}, "causal; the spec asks for attn_mask_type=.*no_mask"),
        (
            {"context_parallel_size": 2, "cp_comm_type": "p2p"},
            "cp_comm_type='p2p'.*set 'all_gather' or None",
        ),
        (
            {"context_parallel_size": 2, "cp_comm_type": ["all_gather", "a2a"]},
            r"cp_comm_type=\['all_gather', 'a2a'\].*set 'all_gather' or None",
        ),
        ({"window_size": (128, 128)}, r"window_size=\(128, 128\).*tokens before a token's own, 0"),
        ({"window_size": (-1, 0)}, r"window_size=\(-1, 0\).*tokens before a token's own, 0"),
    ],
)
def test_unsupported_settings_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        core(**kwargs)


@settings(deadline=None)
@given(st.integers(1, 200_000), st.integers(0, 200_000))
def test_a_bucket_covers_the_sample_but_is_not_the_row(max_seqlen: int, extra: int) -> None:
    row_tokens = max_seqlen + extra
    bucket = seqlen_bucket(max_seqlen, row_tokens)
    assert bucket >= max_seqlen
    assert bucket != row_tokens
    assert bucket <= max(96, 3 * max_seqlen)


def test_there_are_few_buckets() -> None:
    assert len({seqlen_bucket(n, 1_000_003) for n in range(1, 131_073)}) <= 24
    assert [seqlen_bucket(n, 1) for n in (1, 64, 65, 96, 97, 129)] == [64, 64, 96, 96, 128, 192]


def test_params_have_the_fields_of_the_installed_version() -> None:
    cu_seqlens = torch.tensor([0, 70, 100], dtype=torch.int32)
    found = packed_seq_params(cu_seqlens, 70, 100)
    assert found.qkv_format == "thd"
    for name in ("q", "kv"):
        assert getattr(found, f"cu_seqlens_{name}") is cu_seqlens
        assert getattr(found, f"max_seqlen_{name}") == 96


@pytest.mark.parametrize("cp", [1, 2])
def test_padded_arrays_are_given_only_when_needed(cp: int) -> None:
    """Without `pad_between_seqs` Transformer Engine compares both arrays in every layer."""
    cu_seqlens = torch.tensor([0, 72, 100], dtype=torch.int32)
    found = packed_seq_params(cu_seqlens, 72, 100, cp=cp)
    has_flag = hasattr(found, "pad_between_seqs")
    for name in ("q", "kv"):
        padded = getattr(found, f"cu_seqlens_{name}_padded")
        assert padded is (cu_seqlens if has_flag or cp > 1 else None)


def test_only_fields_of_the_version_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [(name, Any, None) for name in ("qkv_format", "cu_seqlens_q", "pad_between_seqs")]
    later = dataclasses.make_dataclass("Later", fields)
    monkeypatch.setattr(packed, "PackedSeqParams", later)
    found = packed_seq_params(torch.tensor([0, 5], dtype=torch.int32), 5, 5)
    assert found.pad_between_seqs is False
