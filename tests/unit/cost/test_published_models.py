"""Sizes of published models, from their config.json to numbers that their authors give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megapack.cost.memory import MemoryModel
from megapack.job.config.hf_families import FAMILIES
from megapack.job.config.model import ModelConfig
from megapack.layout import Layout
from tests.unit.job.config.hybrid_configs import HYBRID, LATENT
from tests.unit.job.config.published_configs import CONFIGS, FAMILY_MODELS

pytestmark = pytest.mark.unit

QWEN3_30B_A3B = CONFIGS["Qwen3-30B-A3B"]
LLAMA_31_8B = CONFIGS["Llama-3.1-8B"]
DEEPSEEK_V3 = CONFIGS["DeepSeek-V3-bf16"]


def model_of(config: dict[str, Any], folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ModelConfig.from_hf(str(folder), dtype="bf16")


def num_parameters(model: ModelConfig, layout: Layout) -> list[int]:
    """Parameters on a GPU of each stage."""
    memory = MemoryModel(sizes=model)
    stages = (
        memory.stage(layout, stage, live_tokens=0.0, row_tokens=0.0) for stage in range(layout.pp)
    )
    return [stage.parameters // 2 for stage in stages]


# Billions of parameters, by their authors or by the hub, which counts the tensors; without layers
# of multi-token prediction.
PUBLISHED = {
    "Qwen3-1.7B": 1.72,
    "Qwen3-4B": 4.02,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-Embedding-0.6B": 0.596,
    "Llama-3.1-8B": 8.03,
    "Mistral-7B-v0.3": 7.25,
    "Mixtral-8x7B": 46.7,
    "Qwen2-0.5B": 0.494,
    "Qwen1.5-MoE-A2.7B": 14.3,
    "DeepSeek-V2-Lite": 15.7,
    "DeepSeek-V3-bf16": 671.0,
    "Kimi-K2-bf16": 1026.0,
    # Those of V3, of which its report speaks as well.
    "DeepSeek-V3.2-bf16": 671.0,
    "GLM-5-bf16": 744.0,
    "Moonlight-16B-A3B": 15.96,
    "GLM-4.7-Flash": 29.9,
    "GLM-4-9B-0414": 9.40,
    "MiniMax-M2-bf16": 228.7,
    "Seed-OSS-36B": 36.15,
    "ERNIE-4.5-0.3B": 0.361,
    "MiMo-7B-RL": 7.62,
    "DeepSeek-V2": 236.0,
    "ERNIE-4.5-21B-A3B": 21.83,
    "Hunyuan-7B": 7.50,
    "Hunyuan-A13B": 80.39,
    "Gemma-2-9B": 9.24,
    "OLMo-2-7B": 7.30,
    "OLMo-3-7B": 7.30,
    "Phi-4": 14.7,
    "Phi-4-mini": 3.836,
    # Without their vision models.
    "Gemma-3-1B": 1.0,
    "Gemma-3-12B": 11.77,
    "Gemma-4-31B": 30.7,
    "Gemma-4-26B-A4B": 25.2,
    "Qwen2.5-VL-7B": 7.62,
    "Qwen3-VL-4B": 4.02,
    "Qwen3-VL-8B": 8.19,
    "Qwen3-VL-30B-A3B": 30.5,
    "Qwen3-VL-235B-A22B": 235.1,
    "Qwen3.5-35B-A3B": 34.7,
    "gpt-oss-20b-BF16": 20.91,
    "qwen3_next": 79.7,
    "qwen3_5": 26.9,
    "qwen3_5_moe": 34.7,
    "nemotron_h": 31.6,
    # 120.6 and 550 by their reports. The hub counts 560.5 of Ultra: with a depth of multi-token
    # prediction.
    "Nemotron-3-Super-120B-A12B": 120.6,
    "Nemotron-3-Ultra-550B-A55B": 550.0,
}
# Those of GLM-4.5's report have neither embedding nor output matrix, and the layer of multi-token
# prediction.
WITH_MTP = {"GLM-4.5-Air": 106.0, "GLM-4.6": 355.0}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str, tmp_path: Path) -> None:
    (total,) = num_parameters(model_of((CONFIGS | HYBRID | LATENT)[name], tmp_path), Layout())
    assert total / 1e9 == pytest.approx(PUBLISHED[name], rel=5e-3)


@pytest.mark.parametrize("name", WITH_MTP)
def test_parameters_of_layers(name: str, tmp_path: Path) -> None:
    model = model_of(CONFIGS[name], tmp_path)
    (total,) = num_parameters(model, Layout())
    kind, _ = list(model.layer_kinds())[-1]
    mtp = sum(kind.layer_parameters()) + 2 * model.hidden_size**2
    assert model.vocab_size is not None
    layers = total - 2 * model.vocab_size * model.hidden_size
    assert (layers + mtp) / 1e9 == pytest.approx(WITH_MTP[name], rel=0.02)


def test_every_family_has_a_published_count() -> None:
    names = {*CONFIGS, *HYBRID, *LATENT} - {"qwen3_5_text", "qwen3_5_moe_text"}
    assert names == PUBLISHED.keys() | WITH_MTP.keys()
    assert FAMILIES.keys() == FAMILY_MODELS.keys() | HYBRID.keys()


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        *[(QWEN3_30B_A3B, 3.3), (DEEPSEEK_V3, 37.0), (LLAMA_31_8B, 8.03)],
        *[(CONFIGS["Moonlight-16B-A3B"], 2.9), (CONFIGS["Kimi-K2-bf16"], 32.6)],
        *[(LATENT["Nemotron-3-Super-120B-A12B"], 12.7)],
        *[(LATENT["Nemotron-3-Ultra-550B-A55B"], 55.0)],
    ],
)
def test_parameters_that_a_token_uses(
    config: dict[str, Any], billions: float, tmp_path: Path
) -> None:
    """A multiply and an add per weight; the authors count the embedding, which has neither."""
    sizes = model_of(config, tmp_path)
    flops = sum(kind.layer_flops_per_token() * n for kind, n in sizes.layer_kinds())
    flops += sizes.head_flops_per_token()
    embedding = sizes.vocab_size * sizes.hidden_size
    assert (flops / 2 + embedding) / 1e9 == pytest.approx(billions, rel=0.03)


def test_stages_hold_the_layers_that_they_have(tmp_path: Path) -> None:
    """The stages' parameters add up to the model's; dense layers are on the first stage alone."""
    config = {**DEEPSEEK_V3, "num_hidden_layers": 60}
    model = model_of(config, tmp_path)
    stages = num_parameters(model, Layout(pp=4))
    assert sum(stages) == num_parameters(model, Layout())[0]
    assert stages[1] == stages[2]
    dense, experts = (kind.layer_parameters() for kind, _ in model.layer_kinds())
    embedding = 129280 * 7168
    assert stages[1] == 15 * sum(experts)
    assert stages[0] == 3 * sum(dense) + 12 * sum(experts) + embedding
