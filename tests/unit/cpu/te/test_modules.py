"""Transformer Engine's own modules on stand-ins, in a process of their own, against torch's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.child import child
from tests.te_python import te_folder, without_te

pytestmark = pytest.mark.unit

RELEASES = ("2.9.0", pytest.param("2.11.0", marks=pytest.mark.weekly), "2.20.2")

MODULES = """
import json, warnings; warnings.simplefilter("ignore")
from megapack import cpu; cpu.enable()
import torch, torch.nn.functional as F, transformer_engine.pytorch as te
from megapack.cpu.te import calls
from megatron.core.extensions.transformer_engine import HAVE_TE
results = {"megatron": HAVE_TE, "errors": {}}
torch.manual_seed(1)
kernels, run = set(), calls.run
def watch(name, *call):
    kernels.add(name)
    return run(name, *call)
calls.run = watch

def compare(name, dtype, run, want, inputs, params):
    y, w = run(), want()
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, (*inputs, *params), dy)
    wanted = torch.autograd.grad(w, (*inputs, *params), dy)
    pairs = zip((y, *found), (w, *wanted), strict=True)
    errors = [float((a - b).norm() / b.norm()) for a, b in pairs]
    results["errors"][f"{name}-{dtype}"] = max(errors)

for dtype in (torch.float64, torch.float32, torch.bfloat16):
    x = torch.randn(6, 16, dtype=dtype, requires_grad=True)
    linear = te.Linear(16, 8, params_dtype=dtype)
    compare("linear", dtype, lambda: linear(x), lambda: F.linear(x, linear.weight, linear.bias),
            (x,), (linear.weight, linear.bias))
    fused = te.LayerNormLinear(16, 8, bias=False, normalization="RMSNorm", params_dtype=dtype)
    gamma = fused.layer_norm_weight
    compare("norm_linear", dtype, lambda: fused(x),
            lambda: F.linear(F.rms_norm(x, (16,), gamma, 1e-5), fused.weight),
            (x,), (gamma, fused.weight))
    grouped = te.GroupedLinear(2, 16, 8, bias=False, params_dtype=dtype)
    weights = [grouped.weight0, grouped.weight1]
    compare("grouped", dtype, lambda: grouped(x, [2, 4]),
            lambda: torch.cat([x[:2] @ weights[0].t(), x[2:] @ weights[1].t()]), (x,), weights)
    q, k, v = (torch.randn(9, heads, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    core = te.DotProductAttention(4, 8, num_gqa_groups=2, attn_mask_type="padding_causal",
                                  qkv_format="thd", attention_dropout=0.0)
    def attend():
        return core(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=5, max_seqlen_kv=5)
    def one_by_one():
        heads = [t.transpose(0, 1) for t in (q, k, v)]
        parts = [F.scaled_dot_product_attention(*(h[:, i:j] for h in heads), is_causal=True,
                 enable_gqa=True) for i, j in ((0, 4), (4, 9))]
        return torch.cat(parts, 1).transpose(0, 1).reshape(9, 32)
    compare("attention", dtype, attend, one_by_one, (q, k, v), ())
results["kernels"] = [name for name in ("fused_attn_fwd", "fused_attn_bwd") if name in kernels]
import transformer_engine_torch as tex
try:
    tex.nvfp4_data_transpose(None)
except NotImplementedError as error:
    results["refused"] = str(error)
print(json.dumps(results))
"""


@pytest.fixture(scope="module", params=RELEASES)
def modules(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Errors of the modules of a release."""
    if without_te(request.param):
        pytest.skip(without_te(request.param))
    return child(MODULES, path=te_folder(request.param))


def test_modules_compute_what_torch_computes(modules: dict[str, Any]) -> None:
    limits = {"torch.float64": 1e-12, "torch.float32": 3e-6, "torch.bfloat16": 0.03}
    errors = modules["errors"]
    assert len(errors) == 12
    assert not {k: e for k, e in errors.items() if e > limits[k.split("-")[1]]}


def test_megatron_finds_transformer_engine(modules: dict[str, Any]) -> None:
    assert modules["megatron"]
    assert modules["kernels"] == ["fused_attn_fwd", "fused_attn_bwd"]


def test_a_kernel_without_a_stand_in_says_so(modules: dict[str, Any]) -> None:
    assert modules["refused"].startswith(
        "transformer_engine_torch.nvfp4_data_transpose has no stand"
    )
