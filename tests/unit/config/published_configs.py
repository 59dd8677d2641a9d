"""config.json of published models: their keys and values, written down as numbers."""

from __future__ import annotations

from typing import Any

from tools.benching.hf_configs import HF_CONFIGS

ANY: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
"""Keys that most have."""


def sizes(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, positions: int
) -> dict[str, Any]:
    """The sizes that all have."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


def _experts(width: int, count: int, shared: int, top_k: int, dense: int, scale: float) -> Any:
    """Experts of DeepSeek's kind without groups, after some dense layers."""
    return {
        "first_k_dense_replace": dense,
        "moe_intermediate_size": width,
        "n_group": 1,
        "n_routed_experts": count,
        "n_shared_experts": shared,
        "norm_topk_prob": True,
        "num_experts_per_tok": top_k,
        "routed_scaling_factor": scale,
        "topk_group": 1,
    }


_REMOTE_DEEPSEEK = {
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "seq_aux": True,
    "v_head_dim": 128,
}
_GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "model_type": "glm4_moe",
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **HF_CONFIGS,
    "Mistral-7B-v0.3": {
        **ANY,
        **sizes(32, 4096, 14336, 32, 8, 32768, 32768),
        "architectures": ["MistralForCausalLM"],
        "head_dim": 128,
        "model_type": "mistral",
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "Mixtral-8x7B": {
        **ANY,
        **sizes(32, 4096, 14336, 32, 8, 32000, 32768),
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "Qwen2-0.5B": {
        **ANY,
        **sizes(24, 896, 4864, 14, 2, 151936, 32768),
        "architectures": ["Qwen2ForCausalLM"],
        "max_window_layers": 21,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "Qwen1.5-MoE-A2.7B": {
        **ANY,
        **sizes(24, 2048, 5632, 16, 16, 151936, 8192),
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "Kimi-K2-bf16": {
        **HF_CONFIGS["DeepSeek-V3-bf16"],
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "model_type": "kimi_k2",
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            **HF_CONFIGS["DeepSeek-V3-bf16"]["rope_scaling"],
            "beta_fast": 1.0,
            "factor": 32.0,
        },
        "routed_scaling_factor": 2.827,
        "seq_aux": True,
        "topk_group": 1,
        "vocab_size": 163840,
    },
    "Moonlight-16B-A3B": {
        **ANY,
        **sizes(27, 2048, 11264, 16, 16, 163840, 8192),
        **_experts(1408, 64, 2, 6, 1, 2.446),
        **_REMOTE_DEEPSEEK,
        "architectures": ["DeepseekV3ForCausalLM"],
        "ep_size": 1,
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "DeepSeek-V2-Lite": {
        **ANY,
        **sizes(27, 2048, 10944, 16, 16, 102400, 163840),
        **_experts(1408, 64, 2, 6, 1, 1.0),
        **_REMOTE_DEEPSEEK,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    },
    "GLM-4.5-Air": {
        **ANY,
        **sizes(46, 4096, 10944, 96, 8, 151552, 131072),
        **_experts(1408, 128, 1, 8, 1, 1.0),
        **_GLM4_MOE,
        "use_qk_norm": False,
    },
    "GLM-4.6": {
        **ANY,
        **sizes(92, 5120, 12288, 96, 8, 151552, 202752),
        **_experts(1536, 160, 1, 8, 3, 2.5),
        **_GLM4_MOE,
        "use_qk_norm": True,
    },
    "Seed-OSS-36B": {
        **ANY,
        **sizes(64, 5120, 27648, 80, 8, 155136, 524288),
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_out_bias": False,
        "head_dim": 128,
        "mlp_bias": False,
        "model_type": "seed_oss",
        "residual_dropout": 0.1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
    },
    "ERNIE-4.5-0.3B": {
        **ANY,
        **sizes(18, 1024, 3072, 16, 2, 103424, 131072),
        "architectures": ["Ernie4_5ForCausalLM"],
        "head_dim": 128,
        "model_type": "ernie4_5",
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    "MiMo-7B-RL": {
        **ANY,
        **sizes(36, 4096, 11008, 32, 8, 151680, 32768),
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "head_dim": 128,
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 640000,
        "use_sliding_window": False,
    },
    "Qwen3-Embedding-0.6B": {
        **HF_CONFIGS["Qwen3-1.7B"],
        **sizes(28, 1024, 3072, 16, 8, 151669, 32768),
        "max_window_layers": 28,
        "tie_word_embeddings": True,
    },
}
"""By the model's name."""

FAMILY_MODELS = {
    "llama": "Llama-3.1-8B",
    "mistral": "Mistral-7B-v0.3",
    "mixtral": "Mixtral-8x7B",
    "qwen2": "Qwen2-0.5B",
    "qwen2_moe": "Qwen1.5-MoE-A2.7B",
    "qwen3": "Qwen3-4B",
    "qwen3_moe": "Qwen3-30B-A3B",
    "deepseek_v2": "DeepSeek-V2-Lite",
    "deepseek_v3": "DeepSeek-V3-bf16",
    "kimi_k2": "Kimi-K2-bf16",
    "glm4_moe": "GLM-4.5-Air",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "seed_oss": "Seed-OSS-36B",
    "ernie4_5": "ERNIE-4.5-0.3B",
    "mimo": "MiMo-7B-RL",
}
"""A model of each `model_type` of a GPT."""
