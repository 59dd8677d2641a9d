"""The stand-in of fused attention against attention by hand, and the calls that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megapack.cpu.te import KernelFault, attention, enums
from tests.unit.cpu.te import by_hand

pytestmark = pytest.mark.unit

HEADS, GROUPS, WIDTH = 4, 2, 8
MASKS = enums.NVTE_Mask_Type


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype)


def call(q: Tensor, k: Tensor, v: Tensor, lengths: Any = (), **changes: Any) -> dict[str, Any]:
    """Arguments of a forward over packed samples."""
    table = by_hand.ends(lengths)
    longest = max(lengths, default=0)
    return {
        **{"max_seqlen_q": longest, "max_seqlen_kv": longest, "is_training": True},
        **{"scale": WIDTH**-0.5, "dropout": 0.0, "mask": MASKS.NVTE_PADDING_CAUSAL_MASK},
        **{"layout": enums.NVTE_QKV_Layout.NVTE_THD_THD_THD, "window": (-1, 0)},
        **{"cu_seqlens_q": table, "cu_seqlens_kv": table, "q": q, "k": k, "v": v},
        **{"cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None},
        **changes,
    }


def forward(arguments: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = attention.fused_attn_fwd.__wrapped__(**arguments)
    return found


def backward(arguments: dict[str, Any], out: list[Tensor], d_o: Tensor) -> list[Tensor]:
    rest = {name: value for name, value in arguments.items() if name != "is_training"}
    found = attention.fused_attn_bwd.__wrapped__(**rest, o=out[0], d_o=d_o, aux=out[1:])
    return list(found[:3])


def packed(*lengths: int) -> tuple[Tensor, Tensor, Tensor]:
    n = sum(lengths)
    return drawn(n, HEADS, WIDTH), drawn(n, GROUPS, WIDTH), drawn(n + 1, GROUPS, WIDTH)[1:]


@pytest.mark.parametrize("window", [(-1, 0), (2, 0)])
def test_packed_rows_and_their_gradients(window: tuple[int, int]) -> None:
    lengths = (5, 1, 7)
    q, k, v = (t.requires_grad_() for t in packed(*lengths))
    parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    want = torch.cat([by_hand.attention(*part, window=window) for part in parts])
    d_o = drawn(*want.shape)
    grads = torch.autograd.grad(want, (q, k, v), d_o)
    arguments = call(q.detach(), k.detach(), v.detach(), lengths, window=window)
    out = forward(arguments)
    torch.testing.assert_close(out[0], want.detach())
    for found, grad in zip(backward(arguments, out, d_o), grads, strict=True):
        torch.testing.assert_close(found, grad)


def test_the_last_query_sees_the_last_key_of_a_longer_sequence() -> None:
    q, k, v = drawn(3, HEADS, WIDTH), drawn(8, GROUPS, WIDTH), drawn(8, GROUPS, WIDTH)
    arguments = call(q, k, v, [3], mask=MASKS.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK)
    arguments |= {"cu_seqlens_kv": by_hand.ends([8]), "max_seqlen_kv": 8}
    want = by_hand.attention(q, k, v, bottom_right=True)
    torch.testing.assert_close(forward(arguments)[0], want)


def test_tokens_between_samples_are_zero_and_have_no_statistics() -> None:
    q, k, v = packed(8)
    starts = by_hand.ends([4, 4])
    arguments = call(q, k, v, [3, 2], cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts)
    out, statistics, _ = forward(arguments)
    assert not out[[3, 6, 7]].any()
    assert statistics[[3, 6, 7]].isnan().all()
    torch.testing.assert_close(out[4:6], by_hand.attention(q[4:6], k[4:6], v[4:6]))


def test_the_backward_drops_what_the_forward_dropped() -> None:
    q, k, v = packed(16)
    arguments = call(q, k, v, [16], dropout=0.5)
    torch.manual_seed(3)
    out = forward(arguments)
    d_o = drawn(16, HEADS, WIDTH)
    _, _, dv = backward(arguments, out, d_o)
    # The output is linear in v, with the weights that were kept.
    step = drawn(16, GROUPS, WIDTH)
    torch.manual_seed(3)
    moved = forward({**arguments, "v": v + step})[0]
    torch.testing.assert_close(((moved - out[0]) * d_o).sum(), (dv * step).sum())
    assert not torch.equal(out[0], forward({**arguments, "dropout": 0.0})[0])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 5, 8])}, "int64; kernels read int32"),
        ({"cu_seqlens_kv": by_hand.ends([5])}, "cu_seqlens of 2 and of 3 entries"),
        ({"cu_seqlens_q": by_hand.ends([5, -1])}, r"do not rise from 0: \[0, 5, 4\]"),
        ({"max_seqlen_q": 4}, "max_seqlen=4, but a sample of 5 tokens"),
        ({"cu_seqlens_q": by_hand.ends([5, 4])}, "cu_seqlens end at 9, the row has 8 tokens"),
        ({"cu_seqlens_kv": by_hand.ends([8, 0])}, "sample 1 has 3 queries and no keys"),
    ],
)
def test_calls_that_a_kernel_would_read_wrongly(changes: dict[str, Any], fault: str) -> None:
    arguments = call(*packed(5, 3), [5, 3], max_seqlen_kv=8) | changes
    with pytest.raises(KernelFault, match=fault):
        forward(arguments)


def test_a_query_whose_keys_are_all_hidden_is_a_fault() -> None:
    q, k, v = drawn(8, HEADS, WIDTH), drawn(3, GROUPS, WIDTH), drawn(3, GROUPS, WIDTH)
    arguments = call(q, k, v, [8], mask=MASKS.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK)
    arguments |= {"cu_seqlens_kv": by_hand.ends([3])}
    with pytest.raises(KernelFault, match="a query without keys: 8 queries, 3 keys"):
        forward(arguments)


def test_statistics_of_another_shape_are_a_fault() -> None:
    arguments = call(*packed(8), [8])
    out = forward(arguments)
    with pytest.raises(KernelFault, match="softmax statistics"):
        backward(arguments, [out[0], out[1].view(1, 8, HEADS, 1), out[2]], out[0])


def asked(**changes: Any) -> Any:
    types = {"bf16": enums.DType.kBFloat16, "fp32": enums.DType.kFloat32}
    values = {"dtype": "bf16", "heads": 8, "groups": 2, "qk": 128, "v": 128, **changes}
    layout = enums.NVTE_QKV_Layout[values.get("layout", "NVTE_THD_THD_THD")]
    dtype = types[values["dtype"]]
    sizes = (values["heads"], values["groups"], 512, 512, values["qk"], values["v"])
    masks = (enums.NVTE_Bias_Type.NVTE_NO_BIAS, MASKS.NVTE_PADDING_CAUSAL_MASK)
    softmax = enums.NVTE_Softmax_Type[values.get("softmax", "NVTE_VANILLA_SOFTMAX")]
    found = attention.get_fused_attn_backend(True, dtype, dtype, layout, *masks, softmax, 0, *sizes)
    return found.name


@pytest.mark.parametrize(
    "changes",
    [
        {"qk": 20},
        {"qk": 264},
        {"heads": 7},
        {"softmax": "NVTE_LEARNABLE_SOFTMAX"},
        {"layout": "NVTE_Paged_KV_THD_BSHD_BSHD"},
    ],
)
def test_no_kernel_for_sizes_that_cudnn_does_not_take(changes: dict[str, Any]) -> None:
    assert asked() == "NVTE_F16_arbitrary_seqlen"
    assert asked(**changes) == "NVTE_No_Backend"
