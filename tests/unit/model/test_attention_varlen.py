"""torch's varlen attention: its arguments, checked with a kernel written out in torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megapack.errors import ConfigError
from megapack.model.attention import varlen
from megapack.model.attention.packed import packed_seq_params
from megapack.model.attention.row import RowView, row_view
from megapack.model.attention.varlen import PackedVarlen
from megapack.schedule.checks import check_chunks
from tests.forests import masked_attention
from tests.groups import RankOf
from tests.packed_attention import sample_attention
from tests.rehearsal.flash import band, sequences

pytestmark = pytest.mark.unit

HEADS, GROUPS, D = 4, 2, 8
SCALE = 0.3
LENGTHS = [8, 4, 12, 4]


def qkv(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(LENGTHS), heads, D) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def kernel_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert window_size == (-1, 0)
    assert scale is not None
    out = []
    for ends, most, tensor in ((cu_seq_q, max_q, query), (cu_seq_k, max_k, key)):
        assert ends.dtype == torch.int32
        assert ends[-1] == len(tensor)
        assert most >= int(ends.diff().max())
    for q, k in sequences(cu_seq_q, cu_seq_k):
        seen = band(q.stop - q.start, k.stop - k.start, -1)
        out.append(masked_attention(query[q], key[k], value[k], seen, scale))
    return torch.cat(out)


def kernel_2_12(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *lengths: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    assert enable_gqa or query.shape[1] == key.shape[1]
    return kernel_2_11(query, key, value, *lengths, scale=scale, window_size=window_size)


VERSIONS = [kernel_2_11, kernel_2_12]


@pytest.fixture(params=VERSIONS, ids=["2.11", "2.12"])
def kernel(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Tensor]:
    monkeypatch.setattr(varlen, "varlen_kernel", lambda: request.param)
    chosen: Callable[..., Tensor] = request.param
    return chosen


def config(**changes: Any) -> SimpleNamespace:
    values = {"attention_dropout": 0.0, "kv_channels": D, "context_parallel_size": 1}
    return SimpleNamespace(**{**values, **changes})


def core(**changes: Any) -> PackedVarlen:
    return PackedVarlen(config(**changes), 1, AttnMaskType.causal, "self", softmax_scale=SCALE)


def params(cp: int = 1) -> PackedSeqParams:
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return packed_seq_params(cu_seqlens, max(LENGTHS), sum(LENGTHS), cp=cp)


def view(rank: int = 0, cp: int = 1) -> RowView:
    return row_view(params(cp), RankOf(rank, cp))


def test_each_sample_gets_its_own_causal_attention(kernel: Callable[..., Tensor]) -> None:
    # In float64, which the real kernel refuses: this test checks only its arguments.
    q, k, v = (x.requires_grad_() for x in qkv())
    out = core().attend(q, k, v, view())
    wanted = sample_attention(q, k, v, LENGTHS, SCALE)
    torch.testing.assert_close(out, wanted)
    weights = torch.linspace(-1, 1, q.numel()).view_as(q)
    found = torch.autograd.grad((out * weights).sum(), (q, k, v))
    expected = torch.autograd.grad((wanted * weights).sum(), (q, k, v))
    torch.testing.assert_close(found, expected)


def test_values_may_be_narrower_than_keys(
    kernel: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in multi-latent attention. The real kernel takes one width."""

    def one_width(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        return kernel(query, key, value, *args, **options)

    one_width.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]
    monkeypatch.setattr(varlen, "varlen_kernel", lambda: one_width)
    q, k, v = qkv()
    narrow = v[..., : D - 2]
    out = core().attend(q, k, narrow, view())
    assert out.shape == (sum(LENGTHS), HEADS, D - 2)
    torch.testing.assert_close(out, sample_attention(q, k, narrow, LENGTHS, SCALE))


def test_the_module_accepts_bf16_and_flattens_heads(kernel: Callable[..., Tensor]) -> None:
    out = core()(*qkv(torch.bfloat16), packed_seq_params=params())
    assert out.shape == (sum(LENGTHS), HEADS * D)
    assert out.dtype == torch.bfloat16
    exact = sample_attention(*qkv(), LENGTHS, SCALE).flatten(1)
    torch.testing.assert_close(out.double(), exact, atol=0.03, rtol=0.03)


def test_sequences_of_a_slice_and_their_keys() -> None:
    paths = view(1, 2).paths()
    assert paths.query_ends.diff().tolist() == paths.num_queries == [2, 2, 1, 1, 3, 3, 1, 1]
    assert paths.key_ends.diff().tolist() == paths.num_keys == [4, 6, 2, 3, 6, 9, 2, 3]


def test_the_kernel_may_only_be_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 asks these flags; cuDNN would build a graph for each shape of a row."""
    allowed = []

    def kernel(query: Tensor, *args: Any, **options: Any) -> Tensor:
        cuda = torch.backends.cuda
        allowed.append((cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled()))
        return query

    monkeypatch.setattr(varlen, "varlen_kernel", lambda: kernel)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    core().attend(*qkv(), view())
    assert allowed == [(True, False)]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_fp32_is_refused_before_the_kernel() -> None:
    with pytest.raises(ConfigError, match=r"not torch.float32; set model.attention=sdpa"):
        core()(*qkv(torch.float32), packed_seq_params=params())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1.*has none"),
        ({"kv_channels": 264}, "heads of 264 channels"),
        ({"kv_channels": 20}, "takes multiples of 8 up to 256"),
        ({"context_parallel_size": 2, "cp_comm_type": "p2p"}, "PackedVarlen gathers keys"),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        core(**changes)


def test_a_model_with_varlen_attention_is_accepted() -> None:
    layer = torch.nn.Module()
    layer.self_attention = torch.nn.Module()
    layer.self_attention.core_attention = core()
    check_chunks([layer])


def test_the_installed_torch_has_the_arguments_that_are_used() -> None:
    """Only the signature is tested, because the kernel needs CUDA."""
    if not varlen.has_varlen():
        pytest.skip("torch before 2.11")
    known = inspect.signature(varlen.varlen_kernel()).parameters
    assert {"scale", "window_size"} <= set(known)
    names = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert list(known)[:7] == names
