"""What the options of a model must fulfil together.

Two tables, options that need another one and options that do not run with a part of the model, and
other contradictions. Ranges of single numbers are checked by `cost.options`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megapack.cost.options import NEEDED, ModelOptions
from megapack.errors import ConfigError

_INDEXER = ("indexer_top_k", "indexer_num_heads", "indexer_head_dim")
_GLOBAL = ("global_kv_channels", "global_query_groups", "global_keys_as_values")
RECURRENT = (
    *(*NEEDED["G"], *NEEDED["M"]),
    *("linear_conv_kernel_dim", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups"),
)
"""Sizes of the layers that only hybrid models have."""

# An option -> those that are nothing without it.
_NEEDED_BY: Mapping[str, tuple[str, ...]] = {
    "num_experts": (
        *("moe_first_dense_layers", "moe_shared_ffn_hidden_size", "moe_num_groups"),
        *("moe_expert_bias", "moe_bias_update_rate", "moe_latent_size"),
    ),
    "moe_shared_ffn_hidden_size": ("moe_shared_gate", "moe_inner_norms"),
    "moe_num_groups": ("moe_group_top_k", "moe_group_best"),
    "moe_group_top_k": ("moe_num_groups",),
    "kv_lora_rank": (
        *("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("latent_norm_epsilon", "indexer_top_k"),
    ),
    "q_lora_rank": ("indexer_top_k",),
    "qk_layernorm": ("qk_layernorm_over_heads", "qk_layernorm_after_rotation", "indexer_top_k"),
    "indexer_top_k": (*_INDEXER[1:], "indexer_loss_coef", "indexer_rope_interleaved"),
    "indexer_num_heads": ("indexer_top_k",),
    "indexer_head_dim": ("indexer_top_k",),
    "rotary_pattern": (*_GLOBAL, "local_rotary_base"),
    "local_rotary_base": ("rotary_pattern",),
    "attention_window": ("attention_window_pattern",),
    "hybrid_layer_pattern": (*NEEDED["G"], *NEEDED["M"]),
}
# An option that is set -> parts of a model with which it does not run. Megatron numbers layers anew
# within a depth of multi-token prediction, and letters of a pattern are layers.
_EXCLUDED: Mapping[str, str] = {
    "rotary_pattern": "hybrid mtp longrope",
    **dict.fromkeys(_GLOBAL, "hybrid latent mtp"),
    "value_layernorm": "latent mtp",
    "global_keys_as_values": "hybrid latent mtp biases",
    "norm_placement": "mtp hybrid latent plain_experts",
    "attention_score_cap": "latent sinks varlen",
    **dict.fromkeys(("attention_window", "attention_sinks"), "mtp latent"),
    "attention_window_pattern": "hybrid",
    # Megatron-Core's shared experts have no biases.
    "linear_bias": "hybrid latent fp8 shared narrow",
    **dict.fromkeys(("kv_channels", "qkv_bias", "rotary_percent", "local_rotary_base"), "latent"),
    "rotary_interleaved": "latent rotaries",
    # No kernel has sparse attention.
    "indexer_top_k": "mtp te varlen",
    "qk_layernorm_over_heads": "latent global centered layernorm",
    "qk_layernorm_after_rotation": "latent global over_heads",
    "moe_inner_norms": "no_sandwich centered dense_first gate sigmoid bias narrow",
    "layer_scalars": "pre",
    "hybrid_layer_pattern": "gpt_class",
    **dict.fromkeys(("attention_output_gate", "position_embedding_type"), "gpt"),
    **dict.fromkeys(("moe_grouped_gemm", "moe_permute_fusion"), "torch"),
    "mtp_num_layers": "full",
    "fp8": "torch fp32",
}
_DEFAULTS = ModelOptions()


def _parts(model: ModelOptions) -> dict[str, tuple[object, str]]:
    """Parts of `_EXCLUDED`: whether a model has each, and its name."""
    rope, has_experts = model.rope_scaling, model.num_experts is not None
    placement = model.norm_placement
    return {
        "biases": (model.qkv_bias or model.linear_bias, "qkv_bias or linear_bias"),
        "bias": (model.has_expert_bias, "moe_expert_bias or moe_bias_update_rate"),
        "centered": (model.layernorm_zero_centered_gamma, "layernorm_zero_centered_gamma"),
        "dense_first": (model.moe_first_dense_layers, "moe_first_dense_layers"),
        "fp32": (model.dtype != "bf16", f"dtype={model.dtype}"),
        "fp8": (model.fp8, f"fp8={model.fp8}"),
        "full": (model.recompute == "full", "recompute=full, but with selective"),
        "gate": (model.moe_shared_gate, "moe_shared_gate"),
        "global": (model.has_global_heads, "heads of global layers (rotary_pattern)"),
        "gpt": (model.layer_pattern is None, "whole blocks, but with hybrid_layer_pattern"),
        "gpt_class": (model.megatron_class == "gpt", "megatron_class=gpt"),
        "hybrid": (model.layer_pattern is not None, "hybrid_layer_pattern"),
        "latent": (model.uses_mla, "multi-latent attention (kv_lora_rank)"),
        "layernorm": (model.normalization != "RMSNorm", "normalization=LayerNorm"),
        "longrope": (rope.kind == "longrope", "rope_scaling.kind=longrope"),
        "mtp": (model.mtp_num_layers, f"mtp_num_layers={model.mtp_num_layers}"),
        "narrow": (model.moe_latent_size, f"moe_latent_size={model.moe_latent_size}"),
        "no_sandwich": (placement != "sandwich", f"norm_placement={placement}"),
        "over_heads": (model.qk_layernorm_over_heads, "qk_layernorm_over_heads"),
        "plain_experts": (
            has_experts and not model.moe_inner_norms,
            f"num_experts={model.num_experts} without moe_inner_norms",
        ),
        "pre": (placement == "pre", "norm_placement=pre"),
        "rotaries": (
            model.rotary_pattern or rope.depends_on_length,
            "several rotary embeddings (rotary_pattern, rope_scaling.kind=longrope)",
        ),
        "shared": (model.moe_shared_ffn_hidden_size, "moe_shared_ffn_hidden_size"),
        "sigmoid": (model.moe_score_function == "sigmoid", "moe_score_function=sigmoid"),
        "sinks": (model.attention_sinks, "attention_sinks"),
        "te": (model.attention == "te", "attention=te"),
        "torch": (
            model.attention in ("varlen", "sdpa"),
            f"attention={model.attention}, but with Transformer Engine's layers",
        ),
        "varlen": (model.attention == "varlen", "attention=varlen"),
    }


def check_architecture(model: ModelOptions) -> None:
    """Raise ConfigError for the first options of a model that do not fit together."""
    for needed, names in _NEEDED_BY.items():
        for name in filter(model.__getattribute__, names):
            if not getattr(model, needed):
                raise ConfigError(
                    f"model.{name}={_shown(model, name)} needs model.{needed}; set it, or leave "
                    f"{name} out"
                )
    parts = _parts(model)
    for name, excluded in _EXCLUDED.items():
        value = getattr(model, name)
        for is_there, part in map(parts.__getitem__, excluded.split()):
            if value and value != getattr(_DEFAULTS, name) and is_there:
                raise ConfigError(
                    f"model.{name}={_shown(model, name)} does not run with {part}; leave one out"
                )
    for table in (_experts, _attention, _hybrid, _sizes, _kernels):
        for is_wrong, text in table(model):
            if is_wrong:
                raise ConfigError(f"model.{text}")


def _shown(model: ModelOptions, name: str) -> object:
    """The value of an option as it is written in YAML."""
    value = getattr(model, name)
    return str(value).lower() if isinstance(value, bool) else value


_Table = Iterator[tuple[object, str]]
"""Whether something is wrong, and what: without `model.` at the beginning."""


def _experts(model: ModelOptions) -> _Table:
    experts, top_k, dense = model.num_experts, model.moe_top_k, model.moe_first_dense_layers
    if experts is None:
        return
    yield (
        top_k > experts,
        f"moe_top_k={top_k} is above model.num_experts={experts}; set {experts} or less",
    )
    yield (
        dense >= model.num_layers,
        f"moe_first_dense_layers={dense} leaves no layer of model.num_layers={model.num_layers} "
        "with experts; set less, or num_experts=null",
    )
    yield (
        not model.moe_norm_top_k and model.moe_score_function == "sigmoid",
        "moe_norm_top_k=false needs model.moe_score_function=softmax: Megatron-Core always "
        "normalises sigmoids; set one of them otherwise",
    )
    groups, chosen, best = model.moe_num_groups, model.moe_group_top_k, model.moe_group_best
    if groups is None or chosen is None:
        return
    yield (
        experts % groups or chosen > groups,
        f"moe_num_groups={groups} with model.num_experts={experts} and model.moe_group_top_k="
        f"{chosen}; set a divisor of {experts} that is at least {chosen}",
    )
    size = experts // groups
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
    """Multi-latent attention, indexers, and patterns of local and global layers."""
    rope, rotated = model.rope_scaling, model.qk_rope_head_dim or 0
    if model.uses_mla:
        unlike = {
            f"rope_scaling.kind={rope.kind}": rope.kind not in ("none", "yarn"),
            f"num_query_groups={model.num_query_groups}": model.query_groups
            != model.num_attention_heads,
            f"qk_rope_head_dim={rotated}": rotated % 2,
        }
        for key, is_set in unlike.items():
            yield (
                is_set,
                f"{key} does not run with multi-latent attention (kv_lora_rank); change it",
            )
    if model.indexer_top_k is not None:
        yield (
            (model.indexer_head_dim or 0) < rotated,
            f"indexer_head_dim={model.indexer_head_dim} is below model.qk_rope_head_dim={rotated}, "
            "the channels that are rotated; set at least that",
        )
    for name in ("rotary_pattern", "attention_window_pattern"):
        letters = getattr(model, name)
        yield (
            letters is not None and (not letters or set(letters) - {"L", "G"}),
            f"{name} is {letters!r}; set letters L and G, such as LG",
        )
    pairs, count = int(model.head_width * model.rotary_percent) // 2, len(rope.short_factor)
    yield (
        rope.kind == "longrope" and count != pairs,
        f"rope_scaling has {count} numbers in short_factor for {pairs} pairs of rotated channels; "
        f"set {pairs}",
    )


def _hybrid(model: ModelOptions) -> _Table:
    """Patterns of hybrid models."""
    pattern = model.hybrid_layer_pattern
    if pattern is None:
        return
    _, *depths = pattern.split("/")
    yield (
        len(depths) != model.mtp_num_layers or len(set(depths)) > 1,
        f"hybrid_layer_pattern={pattern!r} has {len(depths)} parts after a /, and "
        f"model.mtp_num_layers is {model.mtp_num_layers}; set as many parts, all alike",
    )
    for letter in "EGM":
        number = getattr(model, name := NEEDED[letter][0])
        yield (
            number and letter not in pattern,
            f"hybrid_layer_pattern={pattern!r} has no layer {letter} for model.{name}={number}; "
            "leave that out",
        )
    kinds = set(pattern) & set("*+D")
    yield (
        len(kinds) > 1 or (kinds == {"+"} and model.indexer_top_k),
        f"hybrid_layer_pattern={pattern!r} with model.indexer_top_k={model.indexer_top_k}: all "
        "layers of attention are of one kind; write each as *",
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
    """What is recomputed."""
    modules, names = set(model.recompute_modules), list(model.recompute_modules)
    yield (
        len(modules) < len(names) or not modules,
        f"recompute_modules is {names}; name one or more, each once",
    )
    of_experts = next((name for name in names if name in ("moe_act", "moe")), None)
    yield (
        of_experts and model.num_experts is None,
        f"recompute_modules has {of_experts}, but the model has no experts; leave it out or "
        "set model.num_experts",
    )
    of_te = {"moe_act", "layernorm"} & modules
    yield (
        of_te and model.fp8 == "delayed",
        f"recompute_modules={names} does not run with model.fp8=delayed; leave moe_act and "
        "layernorm out, or set model.fp8=tensorwise",
    )
    yield (
        of_te and model.attention in ("varlen", "sdpa"),
        f"recompute_modules={names} needs Transformer Engine's layers, model.attention is "
        f"{model.attention}; set model.attention=auto or te",
    )
