"""Families of config.json whose models are a GPTModel, and those that megapack cannot build.

A new family is an entry of `FAMILIES` or of `hf_hybrid.HYBRID_FAMILIES`, and must pass the tests
against transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megapack.job.config import hf_experts as experts
from megapack.job.config import hf_hybrid
from megapack.job.config import hf_parts as parts
from megapack.job.config.hf_reader import Family, Values

_LLAMA = Family(
    architecture="LlamaForCausalLM",
    defaults={"num_key_value_heads": None, "rope_theta": 10000.0},
    off=("attention_bias", "mlp_bias"),
    unused=("pretraining_tp",),
)
_MISTRAL = Family(architecture="MistralForCausalLM", parts=(parts.window,))
_MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    defaults={"sliding_window": None, "rope_theta": 1e6},
    only={"router_jitter_noise": (0.0, 0)},
    parts=(parts.window, experts.mixtral_experts),
)
_QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    off=("use_mrope",),
    values={"qkv_bias": True},
    parts=(parts.switched_window,),
)
_QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    off=("use_mrope",),
    on=("qkv_bias",),
    values={"qkv_bias": True},
    parts=(parts.no_window, experts.qwen_experts, experts.gated_shared_expert),
)
_QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    defaults={"head_dim": 128},
    off=("attention_bias",),
    values={"qk_layernorm": True},
    parts=(parts.switched_window, parts.own_head_width),
)
_QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    off=("attention_bias",),
    values={"qk_layernorm": True},
    parts=(parts.no_window, experts.qwen_experts),
)
_DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    off=("attention_bias",),
    on=("rope_interleave",),
    only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    unused=("aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "auto_map"),
    parts=(experts.deepseek_experts, parts.latent_attention),
    num_mtp_layers=0,
)
_DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    off=("attention_bias", "mlp_bias"),
    only={"scoring_func": ("softmax",), "moe_layer_freq": (1,)},
    unused=_DEEPSEEK_V3.unused,
    parts=(experts.unnormed_experts, parts.latent_attention),
)
_GLM4_MOE_LITE = Family(
    architecture="Glm4MoeLiteForCausalLM",
    defaults={"first_k_dense_replace": 1},
    off=("attention_bias",),
    on=("rope_interleave",),
    only={"topk_method": ("noaux_tc",)},
    unused=("pretraining_tp",),
    parts=(experts.deepseek_experts, experts.dense_first, parts.latent_attention),
    num_mtp_layers=0,
)
_SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    flags={"attention_bias": "qkv_bias"},
    off=("attention_out_bias", "mlp_bias"),
    # Published with rates of 0.1; megapack trains without dropout, as the model is evaluated.
    unused=("pretraining_tp", "attention_dropout", "residual_dropout"),
)
_ERNIE4_5 = Family(
    architecture="Ernie4_5ForCausalLM",
    defaults={"tie_word_embeddings": True, "head_dim": 128, "rope_theta": 500000.0},
    off=("use_bias",),
    values={"rotary_interleaved": True},
)
_ERNIE4_5_MOE = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    defaults={"tie_word_embeddings": True, "rope_theta": 500000.0},
    off=("use_bias",),
    on=("use_rmsnorm",),
    only={"moe_gate": ("topk",), "moe_layer_interval": (1,), "moe_norm_min": (1e-12,)},
    unused=(
        *("auto_map", "is_quantized", "moe_capacity", "moe_use_aux_free"),
        "num_nextn_predict_layers",
    ),
    values={"rotary_interleaved": True},
    parts=(experts.ernie_experts,),
)
_HUNYUAN = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    defaults={"num_key_value_heads": None},
    off=("attention_bias", "mlp_bias", "position_embedding_xdrope", "use_cla", "use_mla"),
    on=("use_qk_norm", "use_rotary_pos_emb"),
    only={"norm_type": ("rms",)},
    unused=(
        *("add_classification_head", "attention_dropout", "auto_map", "cla_share_factor"),
        *("class_num", "dense_list", "eod_token_id", "org_vocab_size", "pad_id", "pool_type"),
        *("pretraining_tp", "sep_token_id", "skip_cls_token"),
        # The other name of head_dim.
        "attention_head_dim",
        # Of a multimodal model's text part.
        *("im_end_id", "im_newline_id", "im_start_id", "image_token_id", "mask_init_id"),
        *("num_media_embeds", "text_end_id", "text_start_id"),
        # Without experts those of experts have no effect.
        *("moe_drop_tokens", "moe_intermediate_size", "moe_layer_num_skipped"),
        *("moe_random_routing_dropped_token", "moe_topk", "num_experts", "num_shared_expert"),
        *("norm_topk_prob", "use_mixed_mlp_moe"),
    ),
    values={"qk_layernorm": True, "qk_layernorm_after_rotation": True},
    rope_names={"dynamic": "ntk"},
)
_HUNYUAN_MOE = dataclasses.replace(
    _HUNYUAN,
    architecture="HunYuanMoEV1ForCausalLM",
    on=(*_HUNYUAN.on, "norm_topk_prob", "use_mixed_mlp_moe"),
    only={**_HUNYUAN.only, "moe_layer_num_skipped": (0,)},
    parts=(experts.hunyuan_experts,),
)
_GLM4 = Family(
    architecture="Glm4ForCausalLM",
    flags={"attention_bias": "qkv_bias"},
    defaults={"partial_rotary_factor": 0.5},
    values={"norm_placement": "sandwich", "rotary_interleaved": True},
    is_partly_rotated=True,
)
_MINIMAX_M2 = Family(
    architecture="MiniMaxM2ForCausalLM",
    defaults={"rope_theta": 5e6},
    on=("use_qk_norm", "use_routing_bias"),
    only={
        "qk_norm_type": ("per_layer",),
        "router_jitter_noise": (0.0, 0),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "sliding_window": (None,),
    },
    # Published folders have no weights of multi-token prediction.
    unused=("auto_map", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp"),
    values={"qk_layernorm": True, "qk_layernorm_over_heads": True},
    is_partly_rotated=True,
    parts=(parts.full_attention, parts.rotary_width, experts.biased_experts),
)
# Qwen2 with layers of multi-token prediction, as remote code.
_MIMO = Family(
    architecture="MiMoForCausalLM",
    on=("attention_bias",),
    unused=("auto_map",),
    values={"qkv_bias": True},
    num_mtp_layers=0,
    parts=(parts.no_window,),
)
_DEEPSEEK_V32 = Family(
    architecture="DeepseekV32ForCausalLM",
    off=(*_DEEPSEEK_V3.off, "mlp_bias"),
    on=_DEEPSEEK_V3.on,
    only=_DEEPSEEK_V3.only,
    unused=_DEEPSEEK_V3.unused,
    parts=(*_DEEPSEEK_V3.parts, parts.indexer),
    num_mtp_layers=0,
)
_GLM_MOE_DSA = Family(
    architecture="GlmMoeDsaForCausalLM",
    off=_DEEPSEEK_V32.off,
    on=(*_DEEPSEEK_V32.on, "indexer_rope_interleave"),
    only=_DEEPSEEK_V32.only,
    unused=(*_DEEPSEEK_V32.unused, "index_skip_topk_offset"),
    values={"indexer_rope_interleaved": True},
    parts=(*_DEEPSEEK_V32.parts, parts.own_indexers),
    num_mtp_layers=0,
)
_GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    flags={"attention_bias": "qkv_bias", "use_qk_norm": "qk_layernorm"},
    defaults={"partial_rotary_factor": 0.5},
    is_partly_rotated=True,
    num_mtp_layers=0,
    parts=(experts.deepseek_experts,),
)
_OLMO_NORMS: Values = {
    "qk_layernorm": True,
    "qk_layernorm_over_heads": True,
    "norm_placement": "post",
}
_OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    defaults={"num_key_value_heads": None},
    off=("attention_bias",),
    only={"clip_qkv": (None,)},
    values=_OLMO_NORMS,
)
_OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    defaults={"num_key_value_heads": None, "rope_theta": 5e5, "sliding_window_pattern": 4},
    off=("attention_bias",),
    only={"clip_qkv": (None,)},
    values=_OLMO_NORMS,
    common=parts.layered,
    parts=(parts.layered_window,),
)
_PHI3 = Family(
    architecture="Phi3ForCausalLM",
    defaults={"num_key_value_heads": None, "rope_theta": 10000.0, "sliding_window": None},
    off=("attention_bias", "lm_head_bias", "mlp_bias"),
    only={
        "resid_pdrop": (0.0, 0),
        "embd_pdrop": (0.0, 0),
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    },
    # A length without a scaling of the rotary embedding.
    unused=("auto_map", "original_max_position_embeddings"),
    is_partly_rotated=True,
    rope_names={"su": "longrope", "yarn": "longrope"},
    parts=(parts.window,),
)


_GEMMA: Values = {
    "activation": "gelu_tanh",
    "norm_placement": "sandwich",
    "scale_embeddings": True,
}
_GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    defaults={
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        # transformers reads hidden_activation.
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    off=("attention_bias",),
    only={
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "use_bidirectional_attention": (False, None),
    },
    unused=("cache_implementation", "sliding_window_size"),
    values={**_GEMMA, "layernorm_zero_centered_gamma": True},
    parts=(
        *(parts.own_head_width, parts.alternating_window, parts.attention_scale),
        parts.caps,
    ),
)
_GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    defaults={"query_pre_attn_scalar": 256, "sliding_window_pattern": 6},
    off=("attention_bias",),
    only={
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False, None),
    },
    unused=("cache_implementation", "_sliding_window_pattern"),
    values={**_GEMMA, "layernorm_zero_centered_gamma": True, "qk_layernorm": True},
    common=parts.layered,
    parts=(parts.layered_window, parts.attention_scale),
)
_GEMMA3_VISION = dataclasses.replace(
    _GEMMA3,
    architecture="Gemma3ForConditionalGeneration",
    # Published folders leave most keys out.
    defaults={
        **_GEMMA3.defaults,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
    unused=(
        *_GEMMA3.unused,
        *("text_config", "vision_config", "mm_tokens_per_image"),
        *(f"{token}_token_{kind}" for token in ("boi", "eoi", "image") for kind in ("id", "index")),
    ),
    in_text_config=True,
)
_GEMMA4 = Family(
    architecture="Gemma4ForCausalLM",
    # What transformers assumes.
    defaults={
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": None,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "num_global_key_value_heads": None,
        "num_kv_shared_layers": 0,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    off=("attention_bias",),
    only={
        "hidden_activation": ("gelu_pytorch_tanh",),
        # Of images; text is causal.
        "use_bidirectional_attention": (None, "vision"),
    },
    # The width is doubled in layers that share keys and values only.
    unused=(
        *("use_double_wide_mlp", "vocab_size_per_layer_input", "expert_intermediate_size"),
        "cache_implementation",
    ),
    values={
        **_GEMMA,
        "attention_scale": 1.0,
        "layer_scalars": True,
        "qk_layernorm": True,
        "value_layernorm": True,
    },
    rope_names={"proportional": "proportional"},
    common=parts.layered,
    parts=(
        *(parts.no_layer_embeddings, parts.layered_window, parts.global_heads, parts.logit_cap),
        experts.experts_beside_mlp,
    ),
)
_GEMMA4_VISION = dataclasses.replace(
    _GEMMA4,
    architecture="Gemma4ForConditionalGeneration",
    unused=(
        *_GEMMA4.unused,
        *("text_config", "vision_config", "audio_config", "vision_soft_tokens_per_image"),
        "eoa_token_index",
        *(f"{token}_token_id" for token in ("boi", "eoi", "image", "video", "boa", "eoa", "audio")),
    ),
    in_text_config=True,
)
_GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    defaults={"swiglu_limit": 7.0},
    on=("attention_bias",),
    only={"swiglu_alpha": (1.702,)},
    # The second name of num_experts_per_tok, and the length before yarn.
    unused=("experts_per_token", "initial_context_length"),
    values={
        "linear_bias": True,
        "attention_sinks": True,
        "activation": "quick_gelu",
        "glu_linear_offset": 1.0,
    },
    parts=(
        *(parts.own_head_width, parts.stated_rope),
        *(parts.alternating_window, experts.clamped_experts),
    ),
)
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": _MIXTRAL,
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "deepseek_v3": _DEEPSEEK_V3,
    # Another name for the same model with remote code.
    "kimi_k2": _DEEPSEEK_V3,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v32": _DEEPSEEK_V32,
    "glm4": _GLM4,
    "glm4_moe": _GLM4_MOE,
    "glm4_moe_lite": _GLM4_MOE_LITE,
    "glm_moe_dsa": _GLM_MOE_DSA,
    "minimax_m2": _MINIMAX_M2,
    "seed_oss": _SEED_OSS,
    "ernie4_5": _ERNIE4_5,
    "ernie4_5_moe": _ERNIE4_5_MOE,
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN_MOE,
    "mimo": _MIMO,
    "olmo2": _OLMO2,
    "olmo3": _OLMO3,
    "phi3": _PHI3,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3_VISION,
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4_VISION,
    "gpt_oss": _GPT_OSS,
    **hf_hybrid.HYBRID_FAMILIES,
}
"""Families by `model_type`."""


REFUSED: Mapping[str, str] = {
    **hf_hybrid.REFUSED,
    "deepseek_v4": "its layers compress keys over windows of tokens and mix several hidden states "
    "per token, which megapack's layers do not",
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text"),
        "its layers take keys and values of other layers and have several residual streams, which "
        "Megatron-Core's have not",
    ),
}
"""Families that Megatron-Core or megapack cannot build, with the reason."""
