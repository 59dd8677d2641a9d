"""Checks of the keys of section `model` that only hybrid models have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapack.errors import ConfigError

# Letters of `hybrid_layer_pattern` -> keys that such a layer needs.
_NEEDED: dict[str, tuple[str, ...]] = {
    "G": (
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim"),
    ),
    "M": ("mamba_num_heads",),
    "*": (),
    "-": (),
    "E": ("num_experts",),
}
SIZES = (
    *(*_NEEDED["G"], *_NEEDED["M"]),
    *("linear_conv_kernel_dim", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups"),
)
"""Keys of sizes that only hybrid models have."""


def check_hybrid(keys: Mapping[str, Any]) -> None:
    """Raise ConfigError if the keys of a model's pattern contradict each other.

    Args:
        keys: those of `ModelConfig`, of any model.
    """
    _check_activation(keys)
    pattern = keys["hybrid_layer_pattern"]
    if pattern is None:
        _check_unused(keys)
        return
    if keys["megatron_class"] == "gpt":
        raise ConfigError(
            "model.hybrid_layer_pattern is set and model.megatron_class is gpt; leave one out"
        )
    main, *depths = pattern.split("/")
    num_depths = keys["mtp_num_layers"]
    if len(depths) != num_depths or len(set(depths)) > 1:
        raise ConfigError(
            f"model.hybrid_layer_pattern={pattern!r} has {len(depths)} parts after a /, and "
            f"model.mtp_num_layers is {num_depths}; set as many parts, all alike"
        )
    for part in (main, *depths):
        _check_letters(part, keys)
    if len(main) != keys["num_layers"]:
        raise ConfigError(
            f"model.hybrid_layer_pattern has {len(main)} letters and model.num_layers is "
            f"{keys['num_layers']}; set num_layers={len(main)}"
        )
    _check_heads(keys)


def _check_activation(keys: Mapping[str, Any]) -> None:
    activation = keys["activation"]
    has_gate = keys["gated_linear_unit"]
    has_gates = ("silu", "gelu_tanh", "quick_gelu")
    if activation is not None and (activation in has_gates) != has_gate:
        raise ConfigError(
            f"model.activation={activation} with model.gated_linear_unit={str(has_gate).lower()}; "
            "silu and gelu_tanh have a gate, the others have none"
        )


def _check_unused(keys: Mapping[str, Any]) -> None:
    """Refuse what a model without a pattern does not have."""
    unused = {name: keys[name] for name in (*_NEEDED["G"], *_NEEDED["M"])}
    if keys["megatron_class"] != "hybrid":
        unused["attention_output_gate"] = keys["attention_output_gate"]
        unused["position_embedding_type"] = keys["position_embedding_type"] != "rope"
    for name, value in unused.items():
        if value:
            raise ConfigError(
                f"model.{name} is set, which is for hybrid models; set model.hybrid_layer_pattern "
                "too"
            )


def _check_letters(pattern: str, keys: Mapping[str, Any]) -> None:
    unknown = sorted(set(pattern) - set(_NEEDED))
    if unknown or not pattern:
        why = f"has {unknown[0]!r}" if unknown else "is empty"
        raise ConfigError(
            f"model.hybrid_layer_pattern={pattern!r} {why}; set letters of {''.join(_NEEDED)} (the "
            "keys of layout split it over stages)"
        )
    for letter in pattern:
        for name in _NEEDED[letter]:
            if keys[name] is None:
                raise ConfigError(
                    f"model.hybrid_layer_pattern has layers {letter}, so model.{name} must be set"
                )
    first_dense = keys["moe_first_dense_layers"]
    if first_dense:
        raise ConfigError(
            f"model.moe_first_dense_layers={first_dense} with model.hybrid_layer_pattern, whose "
            "letters say which layers are dense; leave it out"
        )


def _check_heads(keys: Mapping[str, Any]) -> None:
    multiples = (
        ("linear_num_value_heads", "linear_num_key_heads"),
        ("mamba_num_heads", "mamba_num_groups"),
    )
    for name, divisor in multiples:
        if keys[name] is not None and keys[name] % keys[divisor]:
            raise ConfigError(
                f"model.{name}={keys[name]} is no multiple of model.{divisor}={keys[divisor]}; set "
                "one"
            )
