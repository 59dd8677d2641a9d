"""Families of config.json.

A new family is an entry of `FAMILIES`, with what its keys say and what its folders name their
tensors. It must pass the tests against transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megapack.job.config import hf_experts as experts
from megapack.job.config import hf_hybrid as hybrid
from megapack.job.config import hf_parts as parts
from megapack.job.config import hf_tensors as tensors
from megapack.job.config.hf_reader import Family, Tower, Values

_DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    on=("rope_interleave",),
    only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    unused=("auto_map",),
    parts=(experts.deepseek_experts, parts.latent_attention),
    tensors=tensors.LATENT_ATTENTION,
    mtp=tensors.LAYER_MTP,
)
_DEEPSEEK_V32 = dataclasses.replace(
    _DEEPSEEK_V3,
    architecture="DeepseekV32ForCausalLM",
    keys={
        "index_topk": "indexer_top_k",
        "index_n_heads": "indexer_num_heads",
        "index_head_dim": "indexer_head_dim",
    },
    parts=(*_DEEPSEEK_V3.parts, parts.indexer),
    tensors=tensors.SPARSE_ATTENTION,
)
_HUNYUAN = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    defaults={"num_key_value_heads": None},
    on=("use_qk_norm", "use_rotary_pos_emb"),
    only={"norm_type": ("rms",)},
    unused=(
        *("add_classification_head", "attention_dropout", "auto_map", "cla_share_factor"),
        *("class_num", "dense_list", "eod_token_id", "org_vocab_size", "pad_id", "pool_type"),
        *("sep_token_id", "skip_cls_token"),
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
    tensors=tensors.HUNYUAN,
)
_OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    defaults={"num_key_value_heads": None},
    values={"qk_layernorm": True, "qk_layernorm_over_heads": True, "norm_placement": "post"},
    tensors=tensors.NORMS_AFTER,
)
_GEMMA: Values = {"activation": "gelu_tanh", "norm_placement": "sandwich", "scale_embeddings": True}
_GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    defaults={"query_pre_attn_scalar": 256, "sliding_window_pattern": 6},
    only={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False, None),
    },
    unused=("_sliding_window_pattern",),
    values={**_GEMMA, "layernorm_zero_centered_gamma": True, "qk_layernorm": True},
    common=parts.layered,
    parts=(parts.layered_window, parts.attention_scale),
    tensors=tensors.NORMS_AFTER,
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
    only={
        "hidden_activation": ("gelu_pytorch_tanh",),
        # Of images; text is causal.
        "use_bidirectional_attention": (None, "vision"),
    },
    # The width is doubled in layers that share keys and values only.
    unused=("use_double_wide_mlp", "vocab_size_per_layer_input", "expert_intermediate_size"),
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
        *(parts.no_layer_embeddings, parts.layered_window, parts.global_heads),
        experts.experts_beside_mlp,
    ),
    keys={"final_logit_softcapping": "logit_cap"},
    tensors=tensors.GEMMA4,
    stacked=tensors.STACKED_BESIDE_MLP,
)
_MROPE = ("mrope_section", "mrope_interleaved")
_QWEN3_TOWER = Tower(activation="gelu_pytorch_tanh", sizes=("num_position_embeddings",))
_QWEN3_VL = Family(
    architecture="Qwen3VLForConditionalGeneration",
    defaults={"head_dim": 128},
    values={"qk_layernorm": True},
    unused_rope=_MROPE,
    in_text_config=True,
    tower=dataclasses.replace(_QWEN3_TOWER, blocks=("deepstack_visual_indexes",)),
)
_QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    defaults={"partial_rotary_factor": 0.25, "head_dim": 256},
    on=("attn_output_gate",),
    # Without experts those of experts have no effect.
    unused=(
        *("moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob"),
        *("shared_expert_intermediate_size", "num_local_experts"),
    ),
    values={
        "qk_layernorm": True,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
    },
    is_partly_rotated=True,
    common=hybrid.qwen_sizes,
    parts=(hybrid.qwen3_next_layers,),
    tensors=tensors.GATED_DELTA,
    by_key_head=True,
    # The published file does not count it.
    mtp=dataclasses.replace(tensors.QWEN_MTP, assumed=1),
)
_QWEN3_5 = dataclasses.replace(
    _QWEN3_NEXT,
    architecture="Qwen3_5ForCausalLM",
    defaults={**_QWEN3_NEXT.defaults, "norm_topk_prob": True},
    on=("attn_output_gate", "norm_topk_prob"),
    only={"mlp_only_layers": ([], None)},
    # `mamba_ssm_dtype` is of the states of an inference engine. With experts in every layer
    # `intermediate_size` has no effect.
    unused=("mamba_ssm_dtype", "intermediate_size"),
    # All three positions of a text token are the same one.
    unused_rope=_MROPE,
    parts=(hybrid.dense_layers,),
    by_key_head=False,
    mtp=tensors.QWEN_MTP,
)
_QWEN3_5_MOE = dataclasses.replace(
    _QWEN3_5, architecture="Qwen3_5MoeForCausalLM", parts=(hybrid.expert_layers,)
)


def _with_vision(text: Family, tower: Tower | None = None, text_ties: bool | None = None) -> Family:
    """The family of a multimodal model with this text part."""
    name = text.architecture.replace("ForCausalLM", "ForConditionalGeneration")
    return dataclasses.replace(
        text, architecture=name, in_text_config=True, tower=tower, text_ties=text_ties
    )


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults={"num_key_value_heads": None, "rope_theta": 10000.0},
    ),
    "mistral": Family(architecture="MistralForCausalLM", parts=(parts.window,)),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults={"sliding_window": None, "rope_theta": 1e6},
        keys=experts.MIXTRAL,
        parts=(parts.window,),
        tensors=tensors.MIXTRAL,
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", values={"qkv_bias": True}, parts=(parts.switched_window,)
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        on=("qkv_bias",),
        values={"qkv_bias": True},
        parts=(parts.no_window, experts.qwen_experts, experts.gated_shared_expert),
        tensors=tensors.GATED_SHARED_EXPERT,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={"head_dim": 128},
        values={"qk_layernorm": True},
        parts=(parts.switched_window, parts.own_head_width),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        values={"qk_layernorm": True},
        parts=(parts.no_window, experts.qwen_experts),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    # Another name for the same model with remote code.
    "kimi_k2": _DEEPSEEK_V3,
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        only={"scoring_func": ("softmax",)},
        unused=("auto_map",),
        parts=(experts.unnormed_experts, parts.latent_attention),
        tensors=tensors.LATENT_ATTENTION,
    ),
    "deepseek_v32": _DEEPSEEK_V32,
    "glm4": Family(
        architecture="Glm4ForCausalLM",
        keys={"attention_bias": "qkv_bias"},
        defaults={"partial_rotary_factor": 0.5},
        values={"norm_placement": "sandwich", "rotary_interleaved": True},
        is_partly_rotated=True,
        tensors=tensors.GLM4,
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        keys={"attention_bias": "qkv_bias", "use_qk_norm": "qk_layernorm"},
        defaults={"partial_rotary_factor": 0.5},
        is_partly_rotated=True,
        parts=(experts.deepseek_experts,),
        mtp=tensors.LAYER_MTP,
    ),
    "glm4_moe_lite": Family(
        architecture="Glm4MoeLiteForCausalLM",
        defaults={"first_k_dense_replace": 1},
        on=("rope_interleave",),
        only={"topk_method": ("noaux_tc",)},
        parts=(experts.deepseek_experts, experts.dense_first, parts.latent_attention),
        tensors=tensors.LATENT_ATTENTION,
        mtp=tensors.LAYER_MTP,
    ),
    "glm_moe_dsa": dataclasses.replace(
        _DEEPSEEK_V32,
        architecture="GlmMoeDsaForCausalLM",
        on=(*_DEEPSEEK_V32.on, "indexer_rope_interleave"),
        unused=(*_DEEPSEEK_V32.unused, "index_skip_topk_offset"),
        values={"indexer_rope_interleaved": True},
        parts=(*_DEEPSEEK_V32.parts, parts.own_indexers),
    ),
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        defaults={"rope_theta": 5e6},
        on=("use_qk_norm", "use_routing_bias"),
        only={
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "shared_intermediate_size": (0,),
        },
        # Published folders have no weights of multi-token prediction.
        unused=(
            *("auto_map", "mtp_transformer_layers", "num_mtp_modules"),
            *("shared_moe_mode", "use_mtp"),
        ),
        keys=experts.MIXTRAL,
        values={
            "qk_layernorm": True,
            "qk_layernorm_over_heads": True,
            "moe_score_function": "sigmoid",
            "moe_expert_bias": True,
        },
        is_partly_rotated=True,
        parts=(parts.full_attention, parts.rotary_width),
        tensors=tensors.MIXTRAL,
    ),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        keys={"attention_bias": "qkv_bias"},
        # Published with rates of 0.1; megapack trains without dropout, as the model is evaluated.
        unused=("attention_dropout", "residual_dropout"),
    ),
    "ernie4_5": Family(
        architecture="Ernie4_5ForCausalLM",
        defaults={"tie_word_embeddings": True, "head_dim": 128, "rope_theta": 500000.0},
        values={"rotary_interleaved": True},
    ),
    "ernie4_5_moe": Family(
        architecture="Ernie4_5_MoeForCausalLM",
        defaults={"tie_word_embeddings": True, "rope_theta": 500000.0},
        on=("use_rmsnorm",),
        only={"moe_gate": ("topk",), "moe_layer_interval": (1,), "moe_norm_min": (1e-12,)},
        unused=(
            *("auto_map", "is_quantized", "moe_capacity", "moe_use_aux_free"),
            "num_nextn_predict_layers",
        ),
        keys=experts.ERNIE,
        values={"rotary_interleaved": True, "moe_expert_bias": True},
        parts=(experts.ernie_experts,),
        tensors=tensors.ERNIE,
        single_rows=("mlp.router.expert_bias",),
        # Of multi-token prediction.
        kept=("model.mtp_",),
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": dataclasses.replace(
        _HUNYUAN,
        architecture="HunYuanMoEV1ForCausalLM",
        on=(*_HUNYUAN.on, "norm_topk_prob", "use_mixed_mlp_moe"),
        only={**_HUNYUAN.only, "moe_layer_num_skipped": (0,)},
        parts=(experts.hunyuan_experts,),
    ),
    # Qwen2 with layers of multi-token prediction, as remote code.
    "mimo": Family(
        architecture="MiMoForCausalLM",
        on=("attention_bias",),
        unused=("auto_map",),
        values={"qkv_bias": True},
        parts=(parts.no_window,),
        mtp=tensors.MIMO_MTP,
    ),
    "olmo2": _OLMO2,
    "olmo3": dataclasses.replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        defaults={"num_key_value_heads": None, "rope_theta": 5e5, "sliding_window_pattern": 4},
        common=parts.layered,
        parts=(parts.layered_window,),
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults={"num_key_value_heads": None, "rope_theta": 10000.0, "sliding_window": None},
        # A length without a scaling of the rotary embedding.
        unused=("auto_map", "original_max_position_embeddings"),
        is_partly_rotated=True,
        rope_names={"su": "longrope", "yarn": "longrope"},
        parts=(parts.window,),
        tensors={
            **tensors.FUSED_GATE,
            "self_attention.linear_qkv.weight": tensors.attention("qkv_proj"),
        },
    ),
    "gemma2": Family(
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
        only={
            "hidden_activation": ("gelu_pytorch_tanh", None),
            "use_bidirectional_attention": (False, None),
        },
        unused=("sliding_window_size",),
        values={**_GEMMA, "layernorm_zero_centered_gamma": True},
        keys={
            "attn_logit_softcapping": "attention_score_cap",
            "final_logit_softcapping": "logit_cap",
        },
        parts=(parts.own_head_width, parts.alternating_window, parts.attention_scale),
        tensors=tensors.NORMS_AFTER,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _with_vision(
        dataclasses.replace(
            _GEMMA3,
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
        )
    ),
    "gemma4_text": _GEMMA4,
    "gemma4": _with_vision(_GEMMA4),
    "gpt_oss": Family(
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
        keys={**experts.MIXTRAL, "swiglu_limit": "activation_clamp"},
        parts=(parts.own_head_width, parts.stated_rope, parts.alternating_window),
        tensors=tensors.GPT_OSS,
        stacked=tensors.STACKED_COLUMNS,
        has_expert_columns=True,
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen2_5_vl": Family(
        architecture="Qwen2_5_VLForConditionalGeneration",
        values={"qkv_bias": True},
        unused_rope=_MROPE,
        rope_names={"mrope": "default"},
        parts=(parts.no_window,),
        in_text_config=True,
        may_be_flat=True,
        tower=Tower(
            activation="silu",
            sizes=("window_size",),
            blocks=("fullatt_block_indexes",),
            is_interleaved=False,
        ),
    ),
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": dataclasses.replace(
        _QWEN3_VL,
        architecture="Qwen3VLMoeForConditionalGeneration",
        defaults={"norm_topk_prob": True},
        on=("norm_topk_prob",),
        parts=(experts.qwen_experts,),
        text_ties=True,
    ),
    "qwen3_5": _with_vision(_QWEN3_5, tower=_QWEN3_TOWER, text_ties=False),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _with_vision(_QWEN3_5_MOE, tower=_QWEN3_TOWER, text_ties=False),
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "nemotron_h": Family(
        architecture="NemotronHForCausalLM",
        defaults={"head_dim": 128},
        on=("use_conv_bias",),
        only={
            **{"mamba_hidden_act": ("silu",), "mlp_hidden_act": ("relu2",)},
            "mtp_hybrid_override_pattern": ("*E",),
            "mtp_layers_block_type": (["full_attention", "moe"], ["attention", "moe"]),
        },
        unused=(
            # How layers are computed, or their first weights drawn.
            *("chunk_size", "expand", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
            *("num_logits_to_keep", "rescale_prenorm_residual", "use_mamba_kernels"),
            *("time_step_floor", "time_step_max", "time_step_min"),
            # Remote code and other names of keys that are read; attention has no positions.
            *("auto_map", "norm_eps", "rms_norm_eps"),
            *("partial_rotary_factor", "rope_theta", "rope_parameters", "rope_scaling"),
            # How multi-token prediction was trained.
            *("mtp_use_repeated_layer", "mtp_loss_scaling_factor", "keep_mtp_spec_in_bf16"),
            # Without experts those of experts have no effect.
            *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "norm_topk_prob"),
            *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_group"),
            *("routed_scaling_factor", "topk_group", "num_local_experts"),
            # Without Mamba layers so have those.
            *("conv_kernel", "time_step_limit"),
        ),
        values={
            "position_embedding_type": "none",
            "gated_linear_unit": False,
            "activation": "squared_relu",
        },
        common=hybrid.nemotron_sizes,
        tensors=tensors.NEMOTRON,
        outer=tensors.NEMOTRON_OUTER,
        has_blocks=False,
        mtp=tensors.NEMOTRON_MTP,
        kept=("mtp.",),
    ),
}
"""Families by `model_type`."""

LACKING = {
    "deepseek_v4": "Megatron-Core has no attention to compressed keys (CSA, HCA)",
    "kimi_linear": "Megatron-Core has no Kimi Delta Attention",
}
"""Why families are refused, by `model_type`."""
