"""What the options of a model must fulfil together.

Three tables: options that need another one, options that do not run with a part of the model, and
other contradictions. Ranges of single numbers are checked by `cost.options`.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapack.cost.options import NEEDED, ModelOptions
from megapack.errors import ConfigError

_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_INDEXER = ("indexer_top_k", "indexer_num_heads", "indexer_head_dim")
_GLOBAL = ("global_kv_channels", "global_query_groups", "global_keys_as_values")
RECURRENT = (
    *(*NEEDED["G"], *NEEDED["M"]),
    *("linear_conv_kernel_dim", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups"),
)
"""Sizes of the layers that only hybrid models have."""

# Options, what they are nothing without, and what the error says of it. {key} is an option with
# its value.
_NEEDS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        (
            *("moe_first_dense_layers", "moe_shared_ffn_hidden_size", "moe_num_groups"),
            *("moe_expert_bias", "moe_bias_update_rate"),
        ),
        "num_experts",
        "{key} needs experts; set model.num_experts, or leave {name} out",
    ),
    (
        ("moe_shared_gate",),
        "moe_shared_ffn_hidden_size",
        "model.moe_shared_gate=true without a shared expert; set "
        "model.moe_shared_ffn_hidden_size, or moe_shared_gate=false",
    ),
    (
        ("moe_group_best",),
        "moe_num_groups",
        "{key} needs groups of experts; set model.moe_num_groups, or leave it out",
    ),
    (
        ("q_lora_rank", *_LATENT, "latent_norm_epsilon"),
        "kv_lora_rank",
        "{key} needs model.kv_lora_rank; set it for multi-latent attention, or {name}=null",
    ),
    (
        ("indexer_loss_coef", "indexer_rope_interleaved"),
        "indexer_top_k",
        "{key} needs an indexer; set model.indexer_top_k, or leave {name} out",
    ),
    *(
        (
            _INDEXER,
            other,
            "{key} without model.{other}; set it too, or leave out the keys of the indexer",
        )
        for other in (*_INDEXER, "q_lora_rank")
    ),
    (
        _GLOBAL,
        "rotary_pattern",
        "{key} without model.rotary_pattern, which says what layers are global; set it, or leave "
        "the key out",
    ),
    (
        ("attention_window_pattern",),
        "attention_window",
        "{key} without a window; set model.attention_window, or attention_window_pattern=null",
    ),
    (
        (*NEEDED["G"], *NEEDED["M"]),
        "hybrid_layer_pattern",
        "model.{name} is set, which is for hybrid models; set model.hybrid_layer_pattern too",
    ),
)


def check_architecture(model: ModelOptions) -> None:
    """Raise ConfigError for the first options that contradict each other."""
    for names, other, text in _NEEDS:
        for name in names:
            value = getattr(model, name)
            if value and getattr(model, other) is None:
                key = f"model.{name}={value}"
                raise ConfigError(text.format(key=key, name=name, other=other))
    for table in (_experts, _attention, _refused_parts, _norms, _hybrid, _sizes, _kernels):
        for is_wrong, text in table(model):
            if is_wrong:
                raise ConfigError(f"model.{text}")


_Table = Iterator[tuple[object, str]]
"""Whether something is wrong, and what: without `model.` at the beginning."""


def _experts(model: ModelOptions) -> _Table:
    experts, top_k, dense = model.num_experts, model.moe_top_k, model.moe_first_dense_layers
    if experts is not None:
        yield (
            top_k > experts,
            f"moe_top_k={top_k} is above model.num_experts={experts}; set {experts} or less",
        )
        yield (
            dense >= model.num_layers,
            f"moe_first_dense_layers={dense} leaves no layer of model.num_layers="
            f"{model.num_layers} with experts; set less, or num_experts=null",
        )
    yield (
        model.linear_bias and model.moe_shared_ffn_hidden_size is not None,
        f"linear_bias=true with model.moe_shared_ffn_hidden_size={model.moe_shared_ffn_hidden_size}"
        ": Megatron-Core's shared experts have no biases; leave one out",
    )
    yield (
        not model.moe_norm_top_k and model.moe_score_function == "sigmoid",
        "moe_norm_top_k=false needs model.moe_score_function=softmax: Megatron-Core always "
        "normalises sigmoids; set one of them otherwise",
    )
    groups, chosen, best = model.moe_num_groups, model.moe_group_top_k, model.moe_group_best
    if groups is None or chosen is None:
        yield (
            (groups, chosen) != (None, None),
            f"moe_num_groups={groups} and model.moe_group_top_k={chosen}; set both, or neither",
        )
        return
    yield (
        (experts or 0) % groups or chosen > groups,
        f"moe_num_groups={groups} with model.num_experts={experts} and model.moe_group_top_k="
        f"{chosen}; set a divisor of {experts} that is at least {chosen}",
    )
    size = (experts or 0) // groups
    yield (
        best is not None and best > size,
        f"moe_group_best={best} is above the {size} experts of a group; set {size} or less",
    )
    yield (
        (best is None and top_k % chosen) or top_k > chosen * size,
        f"moe_top_k={top_k} is not a multiple of model.moe_group_top_k={chosen} of at most "
        f"{chosen * size}; set one",
    )


def _attention(model: ModelOptions) -> _Table:
    """Multi-latent attention, indexers, rotary embeddings, windows and caps."""
    rope, pattern = model.rope_scaling, model.rotary_pattern
    if model.kv_lora_rank is not None:
        unlike = {
            f"rope_scaling.kind={rope.kind}": rope.kind not in ("none", "yarn"),
            f"local_rotary_base={model.local_rotary_base}": model.local_rotary_base,
            f"kv_channels={model.kv_channels}": model.kv_channels,
            f"num_query_groups={model.num_query_groups}": model.query_groups
            != model.num_attention_heads,
            "qkv_bias=true": model.qkv_bias,
            f"rotary_percent={model.rotary_percent}": model.rotary_percent != 1,
            "rotary_interleaved=true": model.rotary_interleaved,
            f"qk_rope_head_dim={model.qk_rope_head_dim}": (model.qk_rope_head_dim or 0) % 2,
        }
        for key, is_set in unlike.items():
            yield (
                is_set,
                f"{key} does not run with multi-latent attention (model.kv_lora_rank="
                f"{model.kv_lora_rank}); leave it out",
            )
    if model.indexer_top_k is not None:
        yield (
            (model.indexer_head_dim or 0) < (model.qk_rope_head_dim or 0),
            f"indexer_head_dim={model.indexer_head_dim} is below model.qk_rope_head_dim="
            f"{model.qk_rope_head_dim}, the channels that are rotated; set at least that",
        )
        refused = {
            "attention": (
                model.attention in ("te", "varlen"),
                "it has no sparse attention; set auto",
            ),
            "qk_layernorm": (
                not model.qk_layernorm,
                "the indexer reads normalised latents; set true",
            ),
            "megatron_class": (
                model.layer_pattern,
                "layers of a HybridModel have no indexer here; set gpt",
            ),
            "mtp_num_layers": (
                model.mtp_num_layers,
                "layers of multi-token prediction have no indexer here; set 0",
            ),
        }
        for name, (is_refused, why) in refused.items():
            yield (
                is_refused,
                f"{name}={getattr(model, name)} with model.indexer_top_k={model.indexer_top_k}: "
                f"{why}",
            )
    yield (
        (pattern is None) is not (model.local_rotary_base is None),
        f"rotary_pattern={pattern} and model.local_rotary_base={model.local_rotary_base}; set "
        "both, or neither",
    )
    for name in ("rotary_pattern", "attention_window_pattern"):
        letters = getattr(model, name)
        yield (
            letters is not None and (not letters or set(letters) - {"L", "G"}),
            f"{name} is {letters!r}; set letters L and G, such as LG",
        )
    yield (
        model.rotary_interleaved and (pattern or rope.depends_on_length),
        "rotary_interleaved=true does not run with several rotary embeddings (rotary_pattern, "
        "rope_scaling.kind=longrope); set false",
    )
    pairs, count = int(model.head_width * model.rotary_percent) // 2, len(rope.short_factor)
    yield (
        rope.kind == "longrope" and count != pairs,
        f"rope_scaling has {count} numbers in short_factor for {pairs} pairs of rotated channels; "
        f"set {pairs}",
    )
    yield (
        model.global_keys_as_values and (model.qkv_bias or model.linear_bias),
        "global_keys_as_values=true does not run with qkv_bias or linear_bias; leave one out",
    )
    cap = model.attention_score_cap
    yield (
        cap is not None and (model.attention_sinks or model.attention == "varlen"),
        f"attention_score_cap={cap} does not run with attention={model.attention} and "
        f"attention_sinks={str(model.attention_sinks).lower()}: no fused kernel caps scores; set "
        "attention=auto and attention_sinks=false",
    )


def _refused_parts(model: ModelOptions) -> _Table:
    """Options that do not run with a part of the model."""
    parts = {
        "experts": (model.num_experts is not None, f"num_experts={model.num_experts}"),
        "fp8": (model.fp8 is not None, f"fp8={model.fp8}"),
        "hybrid": (
            model.layer_pattern is not None,
            "a HybridModel (megatron_class, hybrid_layer_pattern)",
        ),
        "latent": (model.uses_mla, "multi-latent attention (kv_lora_rank)"),
        "longrope": (model.rope_scaling.kind == "longrope", "rope_scaling.kind=longrope"),
        "mtp": (model.mtp_num_layers > 0, f"mtp_num_layers={model.mtp_num_layers}"),
    }
    placement = model.norm_placement
    with_experts = "" if model.moe_inner_norms else "experts "
    # Megatron numbers layers anew within a depth of multi-token prediction, and letters of a
    # pattern are layers.
    refused = {
        "rotary_pattern": "hybrid mtp longrope",
        **dict.fromkeys((*_GLOBAL, "value_layernorm"), "hybrid latent mtp"),
        "qk_layernorm_after_rotation": "hybrid latent",
        "norm_placement": "" if placement == "pre" else f"{with_experts}mtp hybrid latent",
        "attention_score_cap": "hybrid latent",
        **dict.fromkeys(("attention_window", "attention_sinks"), "mtp hybrid latent"),
        "linear_bias": "hybrid latent fp8",
    }
    for name, others in refused.items():
        for is_set, part in map(parts.__getitem__, others.split()):
            value = getattr(model, name)
            yield value and is_set, f"{name}={value} does not run with {part}; leave one out"


def _norms(model: ModelOptions) -> _Table:
    over_heads, after = model.qk_layernorm_over_heads, model.qk_layernorm_after_rotation
    yield (
        after and (not model.qk_layernorm or over_heads),
        "qk_layernorm_after_rotation=true needs qk_layernorm=true and "
        "qk_layernorm_over_heads=false; set them, or leave it out",
    )
    yield (
        over_heads
        and (
            not model.qk_layernorm
            or model.uses_mla
            or model.layernorm_zero_centered_gamma
            or model.normalization != "RMSNorm"
        ),
        "qk_layernorm_over_heads=true needs qk_layernorm=true, normalization=RMSNorm, "
        "layernorm_zero_centered_gamma=false and no multi-latent attention; set them, or leave it "
        "out",
    )
    yield (
        model.has_global_heads and (over_heads or after),
        "rotary_pattern with heads of global layers does not run with qk_layernorm_over_heads or "
        "qk_layernorm_after_rotation; leave one out",
    )
    yield (
        model.moe_inner_norms
        and (
            model.norm_placement != "sandwich"
            or model.moe_shared_ffn_hidden_size is None
            or model.moe_shared_gate
            or model.moe_first_dense_layers
            or model.moe_score_function != "softmax"
            or model.has_expert_bias
            or model.layernorm_zero_centered_gamma
        ),
        "moe_inner_norms=true needs norm_placement=sandwich, layernorm_zero_centered_gamma=false "
        "and experts in every layer, with a shared expert without a gate, softmax scores and no "
        "expert bias; set them, or leave it out",
    )
    yield (
        model.layer_scalars and model.norm_placement == "pre",
        "layer_scalars=true needs model.norm_placement=post or sandwich; set one",
    )


def _hybrid(model: ModelOptions) -> _Table:
    """Patterns of hybrid models, and what models without one do not have."""
    pattern = model.hybrid_layer_pattern
    if model.layer_pattern is None:
        for name, is_set in (
            ("attention_output_gate", model.attention_output_gate),
            ("position_embedding_type", model.position_embedding_type != "rope"),
        ):
            yield (
                is_set,
                f"{name} is set, which is for hybrid models; set model.hybrid_layer_pattern too",
            )
    if pattern is None:
        return
    yield (
        model.megatron_class == "gpt",
        "hybrid_layer_pattern is set and model.megatron_class is gpt; leave one out",
    )
    _, *depths = pattern.split("/")
    yield (
        len(depths) != model.mtp_num_layers or len(set(depths)) > 1,
        f"hybrid_layer_pattern={pattern!r} has {len(depths)} parts after a /, and "
        f"model.mtp_num_layers is {model.mtp_num_layers}; set as many parts, all alike",
    )
    for name, divisor in (
        ("linear_num_value_heads", "linear_num_key_heads"),
        ("mamba_num_heads", "mamba_num_groups"),
    ):
        heads, number = getattr(model, name), getattr(model, divisor)
        yield (
            heads is not None and heads % number,
            f"{name}={heads} is no multiple of model.{divisor}={number}; set one",
        )


def _sizes(model: ModelOptions) -> _Table:
    """Widths of heads, and the MLP's activation."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    yield (
        model.kv_channels is None and not model.uses_mla and hidden % (2 * heads),
        f"hidden_size={hidden} does not give model.num_attention_heads={heads} heads of an even "
        f"width; set a multiple of {2 * heads}, or model.kv_channels",
    )
    for name in ("kv_channels", "global_kv_channels"):
        width = getattr(model, name) or 0
        yield (
            width % 2,
            f"{name}={width} is odd; rotary embeddings rotate pairs of channels: set {width + 1}",
        )
    percent = model.rotary_percent
    yield (
        not 0 < percent <= 1 or int(model.head_width * percent) % 2,
        f"rotary_percent={percent} of {model.head_width} channels is not an even number in (0, 1]; "
        "set 1 or 0.5",
    )
    for name in ("num_query_groups", "global_query_groups"):
        groups = getattr(model, name) or 1
        yield (
            heads % groups,
            f"num_attention_heads={heads} does not divide over model.{name}={groups}; set a "
            f"divisor of {heads}",
        )
    activation, has_gate = model.activation, model.gated_linear_unit
    yield (
        activation is not None and (activation in ("silu", "gelu_tanh", "quick_gelu")) != has_gate,
        f"activation={activation} with model.gated_linear_unit={str(has_gate).lower()}; silu and "
        "gelu_tanh have a gate, the others have none",
    )
    limit, offset = model.activation_clamp, model.glu_linear_offset
    yield (
        (limit is not None or offset) and activation != "quick_gelu",
        f"activation_clamp={limit} and model.glu_linear_offset={offset} need model.activation="
        "quick_gelu; set it, or null and 0",
    )


def _kernels(model: ModelOptions) -> _Table:
    """What is recomputed, kernels that no machine has for this model, and FP8."""
    modules, shown = set(model.recompute_modules), list(model.recompute_modules)
    yield (
        len(modules) < len(shown) or not modules,
        f"recompute_modules is {shown}; name one or more, each once",
    )
    of_experts = next((name for name in shown if name in ("moe_act", "moe")), None)
    yield (
        of_experts and model.num_experts is None,
        f"recompute_modules has {of_experts}, but the model has no experts; leave it out or "
        "set model.num_experts",
    )
    of_te = {"moe_act", "layernorm"} & modules
    yield (
        of_te and model.fp8 == "delayed",
        f"recompute_modules={shown} does not run with model.fp8=delayed; leave moe_act and "
        "layernorm out, or set model.fp8=tensorwise",
    )
    for key, is_set in (
        ("moe_grouped_gemm=true", model.moe_grouped_gemm),
        ("moe_permute_fusion=true", model.moe_permute_fusion),
        (f"recompute_modules={shown}", of_te),
    ):
        yield (
            is_set and model.attention in ("varlen", "sdpa"),
            f"{key} needs Transformer Engine's layers, model.attention is {model.attention}; set "
            "model.attention=auto or te",
        )
    yield (
        model.mtp_num_layers and model.recompute == "full",
        f"mtp_num_layers={model.mtp_num_layers} does not run with model.recompute=full; set "
        "model.recompute=selective",
    )
    yield (
        model.fp8 is not None and (model.attention not in ("auto", "te") or model.dtype != "bf16"),
        f"fp8={model.fp8} with model.attention={model.attention} and model.dtype={model.dtype}; "
        "set model.attention=te and model.dtype=bf16",
    )
