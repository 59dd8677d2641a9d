"""Stand-ins of kernels: the calls that they refuse, and lists of tensors against torch's.

Their values are judged by `tests/dist/exactness/test_te_exactness.py` and `test_modules`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megapack.cpu.te import KernelFault, calls, enums, gemm, lists, norms, ring, rope
from megapack.cpu.te import permutation as moe
from megapack.cpu.te.calls import KERNELS, kernel, set_version
from tests.unit.cpu.te import by_hand

pytestmark = pytest.mark.unit


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def compare(found: Any, want: Any) -> None:
    for one, two in zip(found, want, strict=True):
        torch.testing.assert_close(one, two)


def test_rms_norm_with_gamma_around_zero() -> None:
    x, gamma, grad = drawn(2, 3, 8).requires_grad_(), drawn(8).requires_grad_(), drawn(2, 3, 8)
    want = F.rms_norm(x, (8,), gamma + 1, eps=1e-5)
    with torch.no_grad():
        y, _, rsigma = norms.rmsnorm_fwd(x, gamma, 1e-5, None, None, torch.float64, 0, True)
        found = norms.rmsnorm_bwd(grad, x, rsigma, gamma, 0, True)
    compare([y, *found], [want.detach(), *torch.autograd.grad(want, (x, gamma), grad)])


def test_a_norm_of_a_transposed_tensor_is_a_fault() -> None:
    with pytest.raises(KernelFault, match="strides"):
        norms.rmsnorm_fwd(drawn(8, 8).t(), drawn(8), 1e-5, None, None, torch.float64, 0, False)


def product(a: Tensor, b: Tensor, layout: str, **changes: Any) -> tuple[Any, ...]:
    names = {"out": None, "bias": None, "grad": False, "accumulate": False} | changes
    out, bias = names["out"], names["bias"]
    dtype = enums.DType.kFloat64
    found = gemm.generic_gemm(
        *(a, layout[0] == "T", b, layout[1] == "T", out, None, dtype, bias, dtype, False, None),
        *(names["grad"], None, 0, names["accumulate"], False),
    )
    return tuple(found)


def test_factors_of_two_types_are_a_fault() -> None:
    with pytest.raises(KernelFault, match=r"a product of torch.float64 and torch.float32"):
        product(drawn(5, 4), drawn(3, 4).float(), "TN")


def test_quantized_outputs_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="a norm with a quantized output is not rehear"):
        norms.rmsnorm_fwd(drawn(2, 8), drawn(8), 1e-5, None, object(), torch.float64, 0, False)


def rotate(x: Tensor, table: Tensor, lengths: list[int], cp: int = 1, rank: int = 0) -> Tensor:
    form = enums.NVTE_QKV_Format.NVTE_THD
    whole = by_hand.ends([length * cp for length in lengths])
    turned: Tensor = rope.fused_rope_forward(x, table, None, form, False, whole, cp, rank)
    return turned


def table(lines: int) -> Tensor:
    angles = torch.rand(lines, 2)
    return torch.cat([angles, angles], -1)[:, None, None, :]


def test_a_table_that_is_too_short_is_a_fault() -> None:
    with pytest.raises(KernelFault, match="5 tokens reads past a table of 4 lines"):
        rotate(drawn(5, 2, 4), table(4), [5])


def test_a_wrong_number_of_copies_is_a_fault() -> None:
    rows = moe.make_row_id_map(torch.ones(2, 2).bool(), 2, 2)
    with pytest.raises(KernelFault, match="4 routed copies, num_out_tokens=3"):
        moe.permute_with_mask_map(drawn(2, 3), rows, None, None, 2, 2, 3, 3, 0)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_takes_torchs_steps(decoupled: bool) -> None:
    weight = drawn(4, 3)
    param = weight.clone().requires_grad_()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([param], lr=0.1, weight_decay=0.2)
    moments = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in (1, 2):
        param.grad = drawn(4, 3) + step
        optimizer.step()
        tensors = [[t] for t in (param.grad, weight, *moments)]
        lists.multi_tensor_adam(
            0, None, tensors, 0.1, 0.9, 0.999, 1e-8, step, int(decoupled), 1, 0.2
        )
    compare([weight], [param.detach()])


def test_masters_stay_in_fp32() -> None:
    master, weight = torch.ones(3), torch.ones(3).bfloat16()
    tensors = [[torch.ones(3)], [weight], [torch.zeros(3)], [torch.zeros(3)], [master]]
    lists.multi_tensor_adam(0, None, tensors, 1e-4, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    assert (master < 1).all()
    assert (weight == 1).all()


def test_norms_of_lists_and_scaling_that_tells_of_infinities() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    total, each = lists.multi_tensor_l2norm(0, None, [tensors], True)
    assert total.tolist() == [5.0]
    assert each.tolist() == [3.0, 4.0]
    flag, out = torch.zeros(1, dtype=torch.int32), [torch.empty(1), torch.empty(2)]
    lists.multi_tensor_scale(0, flag, [tensors, out], 2.0)
    assert out[1].tolist() == [0.0, 8.0]
    assert flag.item() == 0
    lists.multi_tensor_scale(0, flag, [[torch.tensor([float("inf")])], [torch.empty(1)]], 2.0)
    assert flag.item() == 1


def test_odd_slices_and_unpacked_statistics_are_faults() -> None:
    with pytest.raises(KernelFault, match=r"slices without halves: \[0, 3\]"):
        ring.thd_read_half_tensor(torch.zeros(3, 1, 1), by_hand.ends([3]), 0)
    with pytest.raises(KernelFault, match="not packed"):
        ring.thd_read_second_half_lse(torch.zeros(1, 2, 4), by_hand.ends([4, 6]), False, 5)
    with pytest.raises(KernelFault, match="6 tokens for 2 \\* 2 chunks"):
        ring.thd_get_partitioned_indices(by_hand.ends([6]), 6, 2, 0)


def test_a_request_is_waited_for_once() -> None:
    waits = []

    class Request:
        def wait(self) -> None:
            waits.append(1)

    request = ring.WaitedOnce(Request())
    request.wait()
    request.wait()
    assert len(waits) == 1


def test_arguments_follow_the_order_of_the_release() -> None:
    def permuted(a: int, b: int) -> tuple[int, int]:
        return a, b

    call = kernel("a@<2.15 b a@2.15")(permuted)
    try:
        for release, want in (((2, 11), (1, 2)), ((2, 15), (2, 1)), ((2, 20), (2, 1))):
            set_version(release)
            assert call(1, 2) == want
    finally:
        set_version((2, 11))
        del KERNELS["permuted"]


def test_every_call_can_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watch(name: str, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(name)
        return run(*args, **kwargs)

    monkeypatch.setattr(calls, "run", watch)
    KERNELS["make_row_id_map"](torch.ones(2, 2), 2, 2)
    assert seen == ["make_row_id_map"]
