"""config.json of hybrid families: keys and values of published folders."""

from __future__ import annotations

from typing import Any

from tests.unit.job.config.published_configs import qwen3_tower

_LAYERS = 3 * ["linear_attention"] + ["full_attention"]
_GATED_DELTA: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "use_cache": True,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 512,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
_QWEN3_5: dict[str, Any] = {
    **_GATED_DELTA,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
_VISION: dict[str, Any] = {
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
_NO_DEEPSTACK: dict[str, Any] = {"deepstack_visual_indexes": [], "model_type": "qwen3_5"}
_DENSE_TEXT: dict[str, Any] = {
    **_QWEN3_5,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": 16 * _LAYERS,
    "linear_num_value_heads": 48,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
}
_EXPERT_TEXT: dict[str, Any] = {
    **_QWEN3_5,
    **_EXPERTS,
    "hidden_size": 2048,
    "layer_types": 10 * _LAYERS,
    "model_type": "qwen3_5_moe_text",
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
}

HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_GATED_DELTA,
        **_EXPERTS,
        "architectures": ["Qwen3NextForCausalLM"],
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "full_attention_interval": 4,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0.dev0",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_5": {
        **_VISION,
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": _DENSE_TEXT,
        "vision_config": qwen3_tower(27, 1152, 4304, 5120, **_NO_DEEPSTACK),
    },
    "qwen3_5_text": {**_DENSE_TEXT, "architectures": ["Qwen3_5ForCausalLM"]},
    "qwen3_5_moe": {
        **_VISION,
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": _EXPERT_TEXT,
        "vision_config": qwen3_tower(27, 1152, 4304, 2048, **_NO_DEEPSTACK),
    },
    "qwen3_5_moe_text": {**_EXPERT_TEXT, "architectures": ["Qwen3_5MoeForCausalLM"]},
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
        "bos_token_id": 1,
        "chunk_size": 128,
        "conv_kernel": 4,
        "eos_token_id": 2,
        "expand": 2,
        "head_dim": 128,
        "hidden_dropout": 0.0,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "initializer_range": 0.02,
        "intermediate_size": 1856,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 64,
        "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h",
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1,
        "n_groups": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "num_logits_to_keep": 1,
        "pad_token_id": 0,
        "partial_rotary_factor": 1.0,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
        "ssm_state_size": 128,
        "tie_word_embeddings": False,
        "time_step_floor": 0.0001,
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.4",
        "use_bias": False,
        "use_cache": True,
        "use_conv_bias": True,
        "use_mamba_kernels": True,
        "vocab_size": 131072,
    },
}
"""By `model_type`: Qwen3-Next-80B-A3B, Qwen3.5-27B and Qwen3.5-35B-A3B (whole and their text part)
and Nemotron-3-Nano-30B-A3B."""

_SUPER = {
    **HYBRID["nemotron_h"],
    "hidden_size": 4096,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "intermediate_size": 2688,
    "mamba_num_heads": 128,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "moe_shared_expert_overlap": False,
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "num_hidden_layers": 88,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 5.0,
}
_KINDS = {"M": "mamba", "E": "moe", "*": "attention"}
_ULTRA = {
    **_SUPER,
    "hidden_size": 8192,
    "intermediate_size": 5120,
    "layers_block_type": [
        _KINDS[letter]
        for letter in (
            "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*"
            "EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
        )
    ],
    "mamba_num_heads": 256,
    "moe_intermediate_size": 5120,
    "moe_latent_size": 2048,
    "moe_shared_expert_intermediate_size": 10240,
    "mtp_layers_block_type": ["attention", "moe"],
    "num_attention_heads": 64,
    "num_hidden_layers": 108,
}
for _key in ("hybrid_override_pattern", "mtp_hybrid_override_pattern"):
    del _ULTRA[_key]
LATENT: dict[str, dict[str, Any]] = {
    "Nemotron-3-Super-120B-A12B": _SUPER,
    "Nemotron-3-Ultra-550B-A55B": _ULTRA,
}
"""Models whose experts work at a latent width, by name."""
