"""Sizes of published models, from their config.json to numbers that their authors give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megapack.config.model import ModelConfig
from megapack.cost.memory import MemoryModel
from megapack.layout import Layout

pytestmark = pytest.mark.unit

_QWEN: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_4B = {
    **_QWEN,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_window_layers": 36,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = {
    **_QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "tie_word_embeddings": False,
}
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def model_of(config: dict[str, Any], folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ModelConfig.from_hf(str(folder), dtype="bf16")


def num_parameters(model: ModelConfig, layout: Layout) -> list[int]:
    """Parameters on a GPU of each stage."""
    memory = MemoryModel(sizes=model.to_sizes(), untied_embeddings=model.untie_embeddings)
    stages = (
        memory.stage(layout, stage, live_tokens=0.0, row_tokens=0.0) for stage in range(layout.pp)
    )
    return [stage.parameters // 2 for stage in stages]


@pytest.mark.parametrize(
    ("config", "billions"),
    [(QWEN3_4B, 4.02), (QWEN3_30B_A3B, 30.5), (LLAMA_31_8B, 8.03), (DEEPSEEK_V3, 671.0)],
)
def test_parameters(config: dict[str, Any], billions: float, tmp_path: Path) -> None:
    (total,) = num_parameters(model_of(config, tmp_path), Layout())
    assert total / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize(
    ("config", "billions"), [(QWEN3_30B_A3B, 3.3), (DEEPSEEK_V3, 37.0), (LLAMA_31_8B, 8.03)]
)
def test_parameters_that_a_token_uses(
    config: dict[str, Any], billions: float, tmp_path: Path
) -> None:
    """A multiply and an add per weight; the authors count the embedding, which has neither."""
    sizes = model_of(config, tmp_path).to_sizes()
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
    dense, experts = (kind.layer_parameters() for kind, _ in model.to_sizes().layer_kinds())
    embedding = 129280 * 7168
    assert stages[1] == 15 * sum(experts)
    assert stages[0] == 3 * sum(dense) + 12 * sum(experts) + embedding


def test_dense_and_expert_layers_of_deepseek_cost_alike(tmp_path: Path) -> None:
    """A dense layer is as wide as 8 chosen experts and the shared one: chunks stay balanced."""
    sizes = model_of(DEEPSEEK_V3, tmp_path).to_sizes()
    (dense, num_dense), (experts, num_experts) = sizes.layer_kinds()
    assert (num_dense, num_experts) == (3, 58)
    assert dense.layer_cost(4096) == pytest.approx(experts.layer_cost(4096), rel=0.01)
    assert not list(sizes.layer_kinds(5, 0))
    assert [n for _, n in sizes.layer_kinds(2, 4)] == [1, 3]
    assert [n for _, n in sizes.layer_kinds(0, 3)] == [3]
