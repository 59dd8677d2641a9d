"""Settings of tiny models of transformers, one of each family, as published folders have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.toy import width_of

VOCAB_SIZE = 320
"""Megatron pads to a multiple of 128, to 384: 64 rows must not count."""

INIT_STD = 0.12
"""Large enough for log-probs that differ by more than rounding where a model differs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model class of transformers and the settings of its tiny config."""

    name: str
    """Its classes are `NAMEConfig` and `NAMEHEAD`, in the latter without a last Text."""
    settings: Mapping[str, Any]
    head: str = "ForCausalLM"
    published: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of config.json that published folders have and transformers' class does not write."""
    mtp: tuple[str, tuple[int, ...]] | None = None
    """If folders have a depth of multi-token prediction: the kind of its names in `hf_mtp`, and the
    numbers of the layers that its layers are like."""
    stacks_experts: bool = False
    """Whether published folders hold the experts of a layer in one tensor."""


_WIDTH = width_of(64)
_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH * 3 // 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": INIT_STD,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {
    **_DENSE,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
}
_DEEPSEEK: dict[str, Any] = {
    **_DENSE,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
}
# Key widths of 16 and mild decays (`_randomize`): others make transformers' own chunks inexact.
_GATED_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}
_GATED_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
_NO_POSITIONS = {key: _VISION[key] for key in _VISION if key != "num_position_embeddings"}
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
_NEMOTRON: dict[str, Any] = {
    **{
        name: value
        for name, value in _DENSE.items()
        if name not in ("num_hidden_layers", "rms_norm_eps")
    },
    "layers_block_type": [
        *("linear_attention", "moe", "full_attention", "mlp"),
        *("linear_attention", "moe", "linear_attention", "mlp"),
    ],
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    # transformers takes it for a lower limit, which Megatron's kernels do not have.
    "time_step_min": 1e-30,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LAYERED: dict[str, Any] = {
    **_DENSE,
    "sliding_window": 10,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
}
_GEMMA: dict[str, Any] = {
    **_LAYERED,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_GEMMA4: dict[str, Any] = {
    **{name: value for name, value in _GEMMA.items() if name != "query_pre_attn_scalar"},
    "global_head_dim": 24,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 2.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 1e4,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
_GEMMA4_EXPERTS: dict[str, Any] = {
    **_GEMMA4,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_NTK = {
    "type": "dynamic",
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_HUNYUAN: dict[str, Any] = {**_DENSE, "head_dim": 16, "rope_theta": 1e4, "rope_scaling": _NTK}
_GPT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

FAMILIES: dict[str, Family] = {
    "llama": Family(name="Llama", settings={**_DENSE, "rope_theta": 5e5}),
    "llama3_rope": Family(
        name="Llama",
        settings={
            **_DENSE,
            "max_position_embeddings": 131072,
            "rope_theta": 5e5,
            "rope_scaling": _LLAMA3_ROPE,
        },
    ),
    "mistral": Family(
        name="Mistral",
        settings={**_DENSE, "head_dim": 12, "sliding_window": None, "rope_theta": 1e6},
    ),
    "mistral_window": Family(
        name="Mistral",
        settings={**_DENSE, "head_dim": 12, "sliding_window": 20, "rope_theta": 1e6},
    ),
    "mixtral": Family(
        name="Mixtral",
        settings={
            **_DENSE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "output_router_logits": False,
            "rope_theta": 1e6,
        },
    ),
    "qwen2": Family(name="Qwen2", settings={**_DENSE, "rope_theta": 1e6}),
    "qwen2_window": Family(
        name="Qwen2",
        settings={
            **_DENSE,
            "rope_theta": 1e6,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    "qwen2_moe": Family(
        name="Qwen2Moe",
        settings={
            **_MOE,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 48,
            "rope_theta": 1e6,
        },
    ),
    "qwen3": Family(name="Qwen3", settings={**_DENSE, "head_dim": 16, "rope_theta": 1e6}),
    "qwen3_tied": Family(
        name="Qwen3",
        settings={**_DENSE, "head_dim": 16, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    # Published without a beginning of names, as the model without its output layer is saved.
    "qwen3_embedding": Family(
        name="Qwen3",
        head="Model",
        settings={**_DENSE, "head_dim": 16, "rope_theta": 1e6, "tie_word_embeddings": True},
        published={"architectures": ["Qwen3ForCausalLM"]},
    ),
    # A reward model, smaller than the others.
    "qwen3_score": Family(
        name="Qwen3",
        head="ForSequenceClassification",
        settings={
            **_DENSE,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_labels": 1,
            "rope_theta": 1e6,
        },
    ),
    "qwen3_yarn": Family(
        name="Qwen3",
        settings={**_DENSE, "head_dim": 16, "rope_theta": 1e6, "rope_scaling": _GPT_YARN},
    ),
    "qwen3_moe": Family(name="Qwen3Moe", settings={**_MOE, "head_dim": 16, "rope_theta": 1e6}),
    "deepseek_v3": Family(
        name="DeepseekV3",
        settings={
            **_DEEPSEEK,
            "max_position_embeddings": 2560,
            "rope_theta": 1e4,
            "rope_scaling": _YARN,
        },
        published={"scoring_func": "sigmoid"},
    ),
    "moonlight": Family(
        name="DeepseekV3",
        settings={
            **_DEEPSEEK,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            # Large, so that norms of compressed keys, which have 1e-6, would show it.
            "rms_norm_eps": 1e-2,
            "rope_theta": 5e4,
        },
        published={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "seq_aux": True},
    ),
    "deepseek_v2": Family(
        name="DeepseekV2",
        settings={
            **{key: value for key, value in _DEEPSEEK.items() if not key.startswith("num_nextn")},
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "max_position_embeddings": 2560,
            "rope_theta": 1e4,
            "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        published={"scoring_func": "softmax", "moe_layer_freq": 1},
    ),
    "deepseek_v2_groups": Family(
        name="DeepseekV2",
        settings={
            **{key: value for key, value in _DEEPSEEK.items() if not key.startswith("num_nextn")},
            "norm_topk_prob": False,
            "topk_method": "group_limited_greedy",
            "rope_theta": 1e4,
        },
        published={"scoring_func": "softmax", "moe_layer_freq": 1},
    ),
    "glm4_moe_lite": Family(
        name="Glm4MoeLite",
        settings={
            **{name: value for name, value in _DEEPSEEK.items() if name != "first_k_dense_replace"},
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "rms_norm_eps": 1e-2,
            "rope_theta": 1e6,
            "num_nextn_predict_layers": 1,
        },
        published={"first_k_dense_replace": 1, "topk_method": "noaux_tc"},
        mtp=("layer", (3,)),
    ),
    "glm4": Family(
        name="Glm4",
        settings={
            **_DENSE,
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "minimax_m2": Family(
        name="MiniMaxM2",
        settings={
            **_DENSE,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.5,
            },
        },
        published={"attn_type_list": [1] * 4, "rotary_dim": 8, "scoring_func": "sigmoid"},
    ),
    "seed_oss": Family(
        name="SeedOss",
        settings={**_DENSE, "head_dim": 16, "attention_bias": True, "rope_theta": 1e7},
    ),
    "ernie4_5": Family(
        name="Ernie4_5",
        settings={**_DENSE, "head_dim": 16, "tie_word_embeddings": True, "rope_theta": 5e5},
    ),
    "ernie4_5_moe": Family(
        name="Ernie4_5_Moe",
        settings={
            **_DENSE,
            "tie_word_embeddings": True,
            "rope_theta": 5e5,
            "moe_intermediate_size": 32,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        published={"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True},
    ),
    "hunyuan_v1_dense": Family(
        name="HunYuanDenseV1",
        settings={**_HUNYUAN, "tie_word_embeddings": True},
        published={"use_cla": False, "use_qk_norm": True},
    ),
    "hunyuan_v1_moe": Family(
        name="HunYuanMoEV1",
        settings={**_HUNYUAN, "num_experts": 4, "moe_topk": [2] * 4},
        published={"moe_intermediate_size": [96] * 4, "num_shared_expert": [1] * 4},
    ),
    # Published as remote code; its layers are those of Qwen2.
    "mimo": Family(
        name="Qwen2",
        settings={**_DENSE, "rope_theta": 640000.0},
        published={
            "architectures": ["MiMoForCausalLM"],
            "attention_bias": True,
            "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
            "head_dim": 8,
            "model_type": "mimo",
            "num_nextn_predict_layers": 1,
        },
        mtp=("mimo", (3,)),
    ),
    "deepseek_v32": Family(
        name="DeepseekV32",
        settings={
            **_DEEPSEEK,
            "max_position_embeddings": 2560,
            "rope_theta": 1e4,
            "rope_scaling": _YARN,
            "index_topk": 8,
            # With few heads, scores of keys are often equal, as all of them give 0.
            "index_n_heads": 16,
            "index_head_dim": 24,
        },
        published={"scoring_func": "sigmoid"},
    ),
    "glm_moe_dsa": Family(
        name="GlmMoeDsa",
        settings={
            **_DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "rms_norm_eps": 1e-2,
            "rope_theta": 1e6,
            "v_head_dim": 44,
            "index_topk": 8,
            "index_n_heads": 16,
            "index_head_dim": 24,
        },
        published={"scoring_func": "sigmoid", "indexer_rope_interleave": True},
    ),
    "glm4_moe": Family(
        name="Glm4Moe",
        settings={
            **{
                name: value
                for name, value in _DEEPSEEK.items()
                if not name.endswith(("_head_dim", "_lora_rank"))
            },
            "num_key_value_heads": 2,
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_theta": 1e6,
        },
    ),
    "olmo2": Family(name="Olmo2", settings={**_DENSE, "rope_theta": 5e5}),
    "olmo3": Family(
        name="Olmo3",
        settings={
            **_LAYERED,
            "rope_parameters": {
                "full_attention": {**_GPT_YARN, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "phi3": Family(
        name="Phi3",
        settings={
            **_DENSE,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1e4,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1],
                "long_factor": [1.3, 4.0],
            },
        },
    ),
    # Caps that are reached, and windows in every other layer.
    "gemma2": Family(
        name="Gemma2",
        settings={
            **_DENSE,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 10,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
            "rope_theta": 1e4,
        },
        published={"hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 10},
    ),
    "gemma3_text": Family(name="Gemma3Text", settings=_GEMMA),
    "gemma4_text": Family(name="Gemma4Text", settings=_GEMMA4),
    "gemma4_experts": Family(name="Gemma4Text", settings=_GEMMA4_EXPERTS, stacks_experts=True),
    "gemma4": Family(
        name="Gemma4",
        head="ForConditionalGeneration",
        settings={
            "text_config": _GEMMA4,
            "vision_config": {**_SIGLIP, "model_type": "gemma4_vision", "head_dim": 8},
            "audio_config": None,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": Family(
        name="GptOss",
        settings={
            **_DENSE,
            "head_dim": 16,
            "sliding_window": 9,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.8,
            "rope_parameters": {**_GPT_YARN, "truncate": False, "rope_theta": 150000.0},
        },
        stacks_experts=True,
    ),
    "qwen3_next": Family(
        name="Qwen3Next",
        settings={**_MOE, **_GATED_DELTA, **_GATED_EXPERTS, "mlp_only_layers": [1]},
        mtp=("qwen", (2,)),
    ),
    "qwen2_5_vl": Family(
        name="Qwen2_5_VL",
        head="ForConditionalGeneration",
        settings={
            "text_config": {**_DENSE, "rope_parameters": _MROPE},
            "vision_config": {**_NO_POSITIONS, "window_size": 16, "fullatt_block_indexes": [0]},
        },
    ),
    "qwen3_vl": Family(
        name="Qwen3VL",
        head="ForConditionalGeneration",
        settings={
            "text_config": {
                **_DENSE,
                "head_dim": 8,
                "rope_parameters": _MROPE,
                "tie_word_embeddings": True,
            },
            "vision_config": {**_VISION, "deepstack_visual_indexes": [0]},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_moe": Family(
        name="Qwen3VLMoe",
        head="ForConditionalGeneration",
        settings={
            "text_config": {**_MOE, "moe_intermediate_size": 48, "rope_parameters": _MROPE},
            "vision_config": {**_VISION, "deepstack_visual_indexes": [0]},
        },
        stacks_experts=True,
    ),
    "qwen3_5": Family(
        name="Qwen3_5",
        head="ForConditionalGeneration",
        settings={
            "text_config": {**_DENSE, **_GATED_DELTA, "tie_word_embeddings": True},
            "vision_config": _VISION,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": Family(
        name="Qwen3_5Moe",
        head="ForConditionalGeneration",
        settings={
            "text_config": {
                **{name: value for name, value in _DENSE.items() if name != "intermediate_size"},
                **_GATED_DELTA,
                **_GATED_EXPERTS,
            },
            "vision_config": _VISION,
        },
        stacks_experts=True,
    ),
    "nemotron_h": Family(name="NemotronH", settings=_NEMOTRON),
    "nemotron_super": Family(
        name="NemotronH",
        settings={**_NEMOTRON, "moe_latent_size": 24, "num_nextn_predict_layers": 1},
        published={"moe_shared_expert_overlap": False, "mtp_use_repeated_layer": True},
        mtp=("nemotron", (2, 1)),
    ),
}
"""By a name that says what is special; in those of DeepSeek and GLM the first layer is dense."""
