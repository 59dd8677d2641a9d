"""Layers of Transformer Engine in FP8 against rounding by hand, for Hopper and for Blackwell."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megapack.cpu.te import KernelFault, fp8
from megapack.cpu.te.permutation import fused_multi_row_padding, fused_multi_row_unpadding
from megapack.cpu.te.quantize import fused_amax_and_scale_update_after_reduction as update_scales
from tests.child import child
from tests.marks import needs_te
from tests.te_python import VERSION, te_folder, without_te

pytestmark = pytest.mark.unit

# In: 256, out: 160, tokens: 160, so that blocks of 128 are cut short.
START = """
import json, torch
from megapack import cpu
from megapack.cpu.te import KernelFault
cpu.enable(capability=CAPABILITY)
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes

RECIPES = {
    "delayed": recipes.DelayedScaling(),
    "tensorwise": recipes.Float8CurrentScaling(),
    "blockwise": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

def rounded(values, name, axis, is_weight=False, is_gradient=False, amax=None):
    "Values that a product reads that sums over `axis`."
    per_tensor = name in ("delayed", "tensorwise")
    dtype = torch.float8_e5m2 if is_gradient and per_tensor else torch.float8_e4m3fn
    side = {"blockwise": 128, "mxfp8": 32}.get(name)
    if per_tensor:
        block = values.shape
    elif name == "blockwise" and is_weight:
        block = (side, side)
    else:
        block = (1, side) if axis == 1 else (side, 1)
    scale = torch.empty_like(values)
    for i in range(0, values.shape[0], block[0]):
        for j in range(0, values.shape[1], block[1]):
            part = (slice(i, i + block[0]), slice(j, j + block[1]))
            largest = values[part].abs().max() if amax is None else torch.tensor(float(amax))
            quotient = LARGEST[dtype] / largest.double()
            if not per_tensor:
                quotient = torch.exp2(torch.floor(torch.log2(quotient)))
            scale[part] = quotient
    limit = LARGEST[dtype]
    return (values * scale).clamp(-limit, limit).to(dtype).float() / scale

def by_hand(x, weight, dy, name, amaxes=(None, None, None)):
    ax, aw, ad = amaxes
    y = rounded(x, name, 1, amax=ax) @ rounded(weight, name, 1, True, amax=aw).t()
    columns = rounded(weight, name, 0, True, amax=aw)
    dx = rounded(dy, name, 1, is_gradient=True, amax=ad) @ columns
    gradient = rounded(dy, name, 0, is_gradient=True, amax=ad)
    return y, dx, gradient.t() @ rounded(x, name, 0, amax=ax)

def run(layer, x, dy, name, *sizes):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with te.fp8_autocast(enabled=True, fp8_recipe=RECIPES[name]):
        y = layer(x, *sizes)
    y.backward(dy)
    return y.detach(), x.grad

def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())

torch.manual_seed(3)
x, dy = torch.randn(160, 256), torch.randn(160, 160)
linear = te.Linear(256, 160, bias=False, device="cpu")
weight = linear.weight.detach()
"""
LINEAR = """
for name in NAMES:
    amaxes = (None,) * 3
    if name == "delayed":
        # The second step has the scales of the first, whose values are twice as large.
        run(linear, x * 2, dy * 2, name)
        amaxes = x.abs().max() * 2, weight.abs().max(), dy.abs().max() * 2
    found = (*run(linear, x, dy, name), linear.weight.grad.detach().clone())
    wanted = by_hand(x, weight, dy, name, amaxes)
    exact = x @ weight.t(), dy @ weight, dy.t() @ x
    results[name] = {
        "by hand": max(map(relative, found, wanted)),
        "exact": [relative(*pair) for pair in zip(found, exact)],
    }
"""
GROUPED = """
for name in NAMES:
    layer = te.GroupedLinear(3, 256, 160, bias=False, device="cpu")
    sizes = [32, 0, 128]
    if name == "delayed":
        run(layer, x, dy, name, sizes)
    y, dx = run(layer, x, dy, name, sizes)
    parts = [
        by_hand(x[part], getattr(layer, f"weight{e}").detach(), dy[part], name)
        for e, part in ((0, slice(32)), (2, slice(32, 160)))
    ]
    wanted = [torch.cat([part[i] for part in parts]) for i in (0, 1)]
    results[name] = {
        "by hand": max(relative(y, wanted[0]), relative(dx, wanted[1])),
        "weights": max(
            relative(layer.weight0.grad, parts[0][2]), relative(layer.weight2.grad, parts[1][2])
        ),
        "empty": float(layer.weight1.grad.abs().sum()),
    }
"""
FAULTS = """
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

def fault(attempt):
    try:
        attempt()
    except (KernelFault, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""

def product(a, b, layout):
    return te.cpp_extensions.general_gemm(a, b, out_dtype=torch.float32, layout=layout)

e4m3 = tex.DType.kFloat8E4M3
of_rows = Float8Quantizer(torch.ones(1), torch.zeros(1), e4m3, rowwise=True, columnwise=False)
a, b = of_rows(torch.randn(32, 64)), of_rows(torch.randn(16, 32))
results["unaligned"] = {
    name: fault(lambda: run(linear, x[:24], dy[:24], name)) for name in NAMES
}
results["usage"] = fault(lambda: product(a, b, "NN"))
results["mixed"] = fault(lambda: product(torch.randn(64, 32), b, "TN"))
b._scale_inv = torch.ones(2)
results["scales"] = fault(lambda: product(of_rows(torch.randn(64, 32)), b, "TN"))
twice = Float8Quantizer(torch.ones(2), torch.zeros(1), e4m3)
results["number"] = fault(lambda: twice(torch.randn(16, 16)))
if "mxfp8" in NAMES:
    in_rows = MXFP8Quantizer(e4m3, rowwise=True, columnwise=False)
    c, d = in_rows(torch.randn(64, 32)), in_rows(torch.randn(32, 32))
    results["mxfp8 usage"] = fault(lambda: product(c, d, "NT"))
    RECIPES["nvfp4"] = recipes.NVFP4BlockScaling()
    results["nvfp4"] = fault(lambda: run(linear, x, dy, "nvfp4"))
try:
    cpu.enable(capability=(8, 0))
except ValueError as error:
    results["capability"] = str(error)
"""
PARTS = {"linear": LINEAR, "grouped": GROUPED, "faults": FAULTS}
GPUS = {(9, 0): ["delayed", "tensorwise", "blockwise"]}
GPUS[10, 0] = [*GPUS[9, 0], "mxfp8"]


@functools.cache
def found_by(capability: tuple[int, int], version: str) -> dict[str, Any]:
    """What each part finds in a process that rehearses a GPU; for other releases the first."""
    names = f"CAPABILITY, NAMES = {capability}, {GPUS[capability]}\n"
    parts = f"parts = {PARTS if version == VERSION else {'linear': LINEAR}!r}\n"
    run = """
found = {}
for part, code in parts.items():
    torch.manual_seed(3)
    found[part] = results = {}
    exec(code, globals() | {"results": results})
print(json.dumps(found))
"""
    return child(names + START + parts + run, path=te_folder(version))


@needs_te
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("version", [VERSION, pytest.param("2.9.0", marks=pytest.mark.weekly)])
def test_a_linear_layer_rounds_as_by_hand(capability: tuple[int, int], version: str) -> None:
    if without_te(version):
        pytest.skip(without_te(version))
    found = found_by(capability, version)["linear"]
    assert list(found) == GPUS[capability]
    for name, errors in found.items():
        assert errors["by hand"] < 1e-6, name
        # e4m3 has 3 bits of a mantissa, e5m2 2: two factors are off by 4 %, with e5m2 by 6 %.
        assert all(0.02 < error < 0.08 for error in errors["exact"]), name


@needs_te
@pytest.mark.parametrize("capability", GPUS)
def test_grouped_layers_round_each_expert_on_its_own(capability: tuple[int, int]) -> None:
    for name, errors in found_by(capability, VERSION)["grouped"].items():
        assert errors["by hand"] < 1e-6, name
        assert errors["weights"] < 1e-6, name
        assert errors["empty"] == 0.0, name


@needs_te
@pytest.mark.parametrize("capability", GPUS)
def test_what_a_gpu_does_not_run_is_a_fault(capability: tuple[int, int]) -> None:
    found = found_by(capability, VERSION)["faults"]
    for name, fault in found["unaligned"].items():
        unit = 32 if name == "mxfp8" else 16
        assert fault.startswith("KernelFault"), name
        assert f"multiple of {unit}" in fault or f"multiples of {unit}" in fault, name
    # Blackwell's products read one copy in any layout.
    needs_columns = "KernelFault: a product needs the columnwise data of a Float8Tensor"
    assert found["usage"].startswith(needs_columns) == (capability == (9, 0))
    assert "scaled by None and by tensor" in found["mixed"]
    assert "scales of a Float8Tensor are (2,)" in found["scales"]
    assert "the scale of a quantizer is (2,)" in found["number"]
    assert "capability (9, 0)" in found["capability"] or "capability (10, 0)" in found["capability"]
    if capability == (10, 0):
        assert "needs the columnwise data of a MXFP8Tensor" in found["mxfp8 usage"]
        assert found["nvfp4"] == "NotImplementedError: NVFP4Quantizer is not rehearsed on the CPU"


@pytest.mark.skipif(bool(without_te("2.20.2")), reason=without_te("2.20.2"))
def test_later_releases_are_refused_by_name() -> None:
    code = """
try:
    run(linear, x, dy, "tensorwise")
except NotImplementedError as error:
    print(json.dumps({"error": str(error)}))
"""
    names = f"CAPABILITY, NAMES = {(9, 0)}, []\n"
    error = child(names + START + code, path=te_folder("2.20.2"))["error"]
    assert error.startswith("FP8 with Transformer Engine 2.20 is not rehearsed on the CPU")


def test_values_beyond_the_range_become_the_largest() -> None:
    one = torch.ones(1)
    data = fp8.encode(torch.tensor([500.0, -1e9, 0.0626, torch.nan]), one, torch.float8_e4m3fn)
    values = fp8.decode(data, torch.float8_e4m3fn)
    assert values[:3].tolist() == [448.0, -448.0, 0.0625]
    assert values[3].isnan()
    assert fp8.decode(fp8.encode(one * 1e9, one, torch.float8_e5m2), torch.float8_e5m2) == 57344


def test_scales_bring_the_largest_value_to_the_end_of_the_range() -> None:
    amax = torch.tensor([3.5, 448.0, 0.0, torch.inf, 1e-44])
    scale = fp8.scale_of(amax, torch.float8_e4m3fn)
    assert scale.tolist() == [128.0, 1.0, 1.0, 1.0, torch.finfo(torch.float32).max]
    powers = fp8.scale_of(torch.tensor([3.0, 5.0]), torch.float8_e4m3fn, power_of_2=True)
    assert powers.tolist() == [128.0, 64.0]
    assert fp8.scale_of(torch.tensor([0.5]), torch.float8_e4m3fn, epsilon=1.0) == 448.0


def test_exponents_round_up() -> None:
    amax = torch.tensor([448.0, 449.0, 896.0, 1.0, 0.0, torch.inf])
    exponents = fp8.exponents(amax, torch.float8_e4m3fn)
    # log2(1 / 448) = -8.8, rounded up: -8.
    assert exponents.tolist() == [127, 128, 128, 119, 0, 254]
    assert fp8.powers(exponents)[:4].tolist() == [1.0, 2.0, 2.0, 2.0**-8]
    assert fp8.inverse_powers(exponents).tolist() == [1.0, 0.5, 0.5, 256.0, 1.0, 0.0]


def test_scales_follow_the_history_of_largest_values() -> None:
    history = torch.tensor([[4.0, 0.0], [1.0, 7.0], [2.0, 7.0]])
    scale = torch.tensor([1.0, 3.0])
    reduced = torch.tensor([8.0, 0.0])
    update_scales(reduced, [history], [scale], "max", torch.float8_e4m3fn, 1)
    # The second tensor was not quantized: nothing of it changes.
    assert history.tolist() == [[0.0, 0.0], [2.0, 7.0], [8.0, 7.0]]
    assert scale.tolist() == [448 / 2 / 8, 3.0]
    update_scales(torch.tensor([4.0, 0.0]), [history], [scale], "most_recent", torch.float8_e5m2, 0)
    assert scale.tolist() == [57344 / 4, 3.0]


@pytest.mark.parametrize(
    ("reduced", "history", "scale"),
    [(3, (4, 2), 2), (2, (4, 2), 3), (2, (2,), 2)],
    ids=["buffer", "scales", "history"],
)
def test_histories_of_other_sizes_are_a_fault(
    reduced: int, history: tuple[int, ...], scale: int
) -> None:
    with pytest.raises(KernelFault):
        update_scales(
            torch.zeros(reduced),
            [torch.zeros(history)],
            [torch.ones(scale)],
            "max",
            torch.float8_e4m3fn,
            0,
        )


def test_experts_rows_are_padded_and_unpadded() -> None:
    rows, padded = torch.randn(5, 3), torch.full((48, 3), torch.nan)
    fused_multi_row_padding(rows, padded, [2, 0, 3], [16, 0, 32])
    assert padded[:2].equal(rows[:2])
    assert padded[16:19].equal(rows[2:])
    assert padded.count_nonzero() == rows.count_nonzero()
    back = torch.empty(5, 3)
    fused_multi_row_unpadding(padded, back, [16, 0, 32], [2, 0, 3])
    assert back.equal(rows)
    with pytest.raises(KernelFault, match="of 5 rows"):
        fused_multi_row_padding(rows, padded, [2, 0, 4], [16, 0, 32])
