"""Megatron's settings for speed: what is chosen on which machine."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import moe_utils

from megapack.errors import ConfigError
from megapack.job.config.sections import ModelConfig, OptimConfig
from megapack.job.gpt import build
from megapack.job.gpt.settings import describe, layer_settings, reduction_settings
from megapack.layout import Layout
from tests.dist.spawn import run_code

pytestmark = pytest.mark.unit

DENSE = ModelConfig(dtype="bf16")
EXPERTS = ModelConfig(dtype="bf16", num_experts=4)
SHARDED = OptimConfig(distributed_optimizer=True)
DP2 = Layout(dp=2)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapack.cpu.uses_cuda", lambda: True)


@pytest.fixture
def engine(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with Transformer Engine, of which TransformerConfig asks for some kernels."""
    monkeypatch.setattr(build, "choose_attention", lambda *_: "te")
    names = ("permute", "permute_with_probs", "unpermute")
    names += ("sort_chunks_by_index", "sort_chunks_by_index_with_probs")
    for name in names:
        monkeypatch.setattr(moe_utils, f"fused_{name}", object(), raising=False)
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope_utils, name, object())


def on(settings: Any) -> set[str]:
    return {name for name, value in settings.items() if value}


@pytest.mark.usefixtures("engine")
def test_with_transformer_engine_the_recipes_settings_are_on() -> None:
    config = build.transformer_config(EXPERTS, Layout())
    for name in (
        *("bias_activation_fusion", "gradient_accumulation_fusion"),
        *("moe_grouped_gemm", "moe_permute_fusion"),
    ):
        assert getattr(config, name) is True, name
    assert on(layer_settings(DENSE, "te")) == {
        "bias_activation_fusion",
        "gradient_accumulation_fusion",
    }


def test_on_the_cpu_all_are_off_and_the_config_builds() -> None:
    layers = layer_settings(EXPERTS, "sdpa")
    reduction = reduction_settings(SHARDED, DP2)
    assert on(layers) == on(reduction) == set()
    text = describe(layers, reduction)
    assert text.startswith("settings on: none; off: bias_activation_fusion, gradient_accumulation")
    config = build.transformer_config(dataclasses.replace(EXPERTS, dtype="fp32"), Layout())
    assert not config.bias_activation_fusion


def test_fp8_is_refused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where Transformer Engine's Python runs on stand-ins.
    monkeypatch.setattr(build, "choose_attention", lambda *_: "te")
    model = dataclasses.replace(DENSE, fp8="delayed", attention="te")
    with pytest.raises(ConfigError, match="fp8=delayed needs a GPU; set model"):
        build.transformer_config(model, Layout(fp8=True))


@pytest.mark.parametrize(
    ("model", "kernel", "message"),
    [
        ({"moe_grouped_gemm": True}, "sdpa", "moe_grouped_gemm=true cannot run here: needs Trans"),
        (
            {"gated_linear_unit": False, "bias_activation_fusion": True},
            "te",
            "an MLP without a gate only with biases",
        ),
        ({"gradient_accumulation_fusion": True}, "sdpa", "the device is not CUDA"),
    ],
)
def test_a_setting_that_cannot_run_is_refused(
    model: dict[str, Any], kernel: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layer_settings(dataclasses.replace(EXPERTS, **model), kernel)


@pytest.mark.usefixtures("cuda")
def test_megatrons_layers_fuse_with_apexs_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    extension = ModuleType("fused_weight_gradient_mlp_cuda")
    extension.__spec__ = importlib.machinery.ModuleSpec(extension.__name__, None)
    monkeypatch.setitem(sys.modules, extension.__name__, extension)
    assert "gradient_accumulation_fusion" in on(layer_settings(DENSE, "varlen"))
    monkeypatch.setattr("megapack.cpu.uses_cuda", lambda: False)
    assert "gradient_accumulation_fusion" not in on(layer_settings(DENSE, "varlen"))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("optim", "layout", "expected"),
    [
        ({}, DP2, {"overlap_grad_reduce"}),
        ({}, Layout(tp=2), set()),
        ({"distributed_optimizer": True}, DP2, {"overlap_grad_reduce", "overlap_param_gather"}),
        (
            {"distributed_optimizer": True, "bucket_size": 7},
            Layout(dp=2, pp=2, vpp=2),
            {"overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "bucket_size"},
        ),
        ({"distributed_optimizer": True, "overlap_grad_reduce": False}, DP2, set()),
    ],
)
def test_reduction_overlaps_where_ranks_share_gradients(
    optim: dict[str, Any], layout: Layout, expected: set[str]
) -> None:
    assert on(reduction_settings(OptimConfig(**optim), layout)) == expected


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({}, "needs optim.distributed_optimizer=true"),
        ({"distributed_optimizer": True}, "needs overlap_grad_reduce, which is off"),
    ],
)
def test_gathers_that_cannot_overlap_are_refused(optim: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reduction_settings(OptimConfig(overlap_param_gather=True, **optim), DP2)


@pytest.mark.usefixtures("engine")
def test_modules_to_recompute_reach_megatron() -> None:
    asked = dataclasses.replace(
        EXPERTS, recompute="selective", recompute_modules=("layernorm", "moe_act")
    )
    config = build.transformer_config(asked, Layout())
    assert config.recompute_granularity == "selective"
    assert config.recompute_modules == ["layernorm", "moe_act"]
    with pytest.raises(ConfigError, match="has layernorm, which Megatron recomputes only with"):
        build._faster(asked, "varlen")
    unfused = dataclasses.replace(asked, moe_grouped_gemm=False)
    with pytest.raises(ConfigError, match="moe_act, which needs moe_grouped_gemm"):
        build.transformer_config(unfused, Layout())


CHILD = """
import json, warnings
warnings.simplefilter("ignore")
from megapack import launch
from megapack.job.config.sections import ModelConfig
from megapack.layout import Layout
from megapack.job.gpt import build
from megatron.core.tensor_parallel import layers

launch.start("cpu")
build.initialize_parallel(Layout(), 1)
layers._grad_accum_fusion_available = True
model = ModelConfig(num_layers=1)
config = build.transformer_config(model, Layout())
config.gradient_accumulation_fusion = True
chunk = build._chunk(build.gpt_class(model), model, Layout(), config, 0, 128)
fc1 = chunk.decoder.layers[0].mlp.linear_fc1
print(json.dumps({
    "head": chunk.output_layer.gradient_accumulation_fusion,
    "fc1": fc1.gradient_accumulation_fusion,
    "restored": build.tensor_parallel.ColumnParallelLinear is layers.ColumnParallelLinear,
}))
"""


def test_all_layers_but_the_output_layer_accumulate_gradients() -> None:
    assert run_code(CHILD) == {"head": False, "fc1": True, "restored": True}
