"""Parts of a config.json that several families share: sizes, rotary embeddings, experts."""

from __future__ import annotations

import math
from typing import Any

from megapack.cost.rope import RopeScaling
from megapack.errors import ConfigError
from megapack.job.config.hf_reader import FILE, MISSING, Reader, Values, is_number


def sizes(reader: Reader) -> Values:
    """The keys of all families but those of layers, norms and rotary embeddings."""
    found = reader.counts("hidden_size", "num_attention_heads", "vocab_size")
    heads = found["num_attention_heads"]
    reader.require("hidden_act", reader.family.defaults.get("hidden_act", "silu"))
    if "attention_dropout" not in reader.family.unused:
        reader.require("attention_dropout", 0.0, 0, None)
    reader.require("chunk_size_feed_forward", 0)
    head_dim = reader.optional_count("head_dim")
    groups = reader.optional_count("num_key_value_heads")
    return {
        **found,
        **reader.counts("max_position_embeddings"),
        "num_query_groups": groups or heads,
        "kv_channels": head_dim or found["hidden_size"] // heads,
        "untie_embeddings": not reader.flag("tie_word_embeddings"),
    }


def common(reader: Reader) -> Values:
    """The keys of all families whose layers are blocks of attention and an MLP."""
    return {**_blocks(reader), **rope(reader)}


def layered(reader: Reader) -> Values:
    """As `common`, for families with local and global layers."""
    return {**_blocks(reader), **layered_rope(reader)}


def _blocks(reader: Reader) -> Values:
    keys = {"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size"}
    return {**sizes(reader), **reader.options({**keys, "rms_norm_eps": "norm_epsilon"})}


def rope(reader: Reader) -> Values:
    """The rotary embedding, from the keys of transformers 4 and 5."""
    given = _rope_object(reader, "rope_parameters")
    scaling = _rope_object(reader, "rope_scaling")
    if given and scaling not in (None, given):
        raise reader.error("rope_scaling", scaling, "rope_parameters says otherwise: keep one")
    rope = dict(given or scaling or {})
    for key in reader.family.unused_rope:
        rope.pop(key, None)
    # Within `rope_parameters` since transformers 5, beside `rope_scaling` before.
    merged = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        inside = rope.pop(key, None)
        outside = reader.get(key, None if inside is not None else MISSING)
        if inside is not None and key in reader.keys and outside != inside:
            raise reader.error(key, outside, "rope_parameters says otherwise: keep one")
        merged[key] = outside if inside is None else inside
    percent = merged["partial_rotary_factor"]
    if percent is not None and not (is_number(percent) and 0 < percent <= 1):
        raise reader.error("partial_rotary_factor", percent, "expected a number of 0 to 1")
    if percent not in (None, 1) and not reader.family.is_partly_rotated:
        raise reader.error(
            "partial_rotary_factor",
            percent,
            "transformers rotates whole heads of this family whatever it says: remove the key",
        )
    return {
        "rotary_base": _rotary_base(reader, merged["rope_theta"]),
        "rotary_percent": 1.0 if percent is None else float(percent),
        "rope_scaling": _rope_scaling(reader, rope),
    }


def stated_rope(reader: Reader) -> Values:
    """A family for which transformers would assume yarn (gpt-oss)."""
    if not (reader.get("rope_parameters") or reader.get("rope_scaling")):
        raise reader.error(
            "rope_scaling",
            None,
            "transformers would assume yarn with numbers of its own: write it into the file",
        )
    return {}


def layered_rope(reader: Reader) -> Values:
    """The rotary embeddings of local and of global layers (Gemma 3, OLMo-3).

    Layers with a sliding window are local ones.
    """
    given = _rope_object(reader, "rope_parameters")
    scaling = _rope_object(reader, "rope_scaling")
    if given is None:
        # As transformers 4 writes it: the scaling is that of global layers.
        whole = {**(scaling or {}), "rope_theta": reader.get("rope_theta")}
        local = {"rope_theta": reader.get("rope_local_base_freq", whole["rope_theta"])}
    else:
        kinds = [given.get(kind) or {} for kind in ("full_attention", "sliding_attention")]
        if not all(isinstance(kind, dict) for kind in kinds):
            raise reader.error(
                "rope_parameters", given, "expected an object for each kind of layer"
            )
        whole, local = map(dict, kinds)
    base, local_base = (
        _rotary_base(reader, rope.pop("rope_theta", None)) for rope in (whole, local)
    )
    if local.pop("rope_type", "default") != "default" or local:
        raise reader.error("rope_parameters", given, "megapack stretches global layers only")
    values = {
        "rotary_base": base,
        "rotary_percent": 1.0,
        "rope_scaling": _rope_scaling(reader, whole),
    }
    letters = _local_layers(reader)
    # Of Gemma 4.
    has_global_heads = "global_head_dim" in reader.family.defaults
    differs = (base, values["rope_scaling"]) != (local_base, RopeScaling())
    if "L" in letters and (differs or has_global_heads):
        values |= {"local_rotary_base": local_base, "rotary_pattern": _shortest(letters)}
    return values


def _local_layers(reader: Reader) -> str:
    """L for each layer with a sliding window, G for the others, by a step (Gemma 3, OLMo-3)."""
    count = reader.count("num_hidden_layers", 1)
    step = reader.count("sliding_window_pattern", 1)
    return _layer_letters(
        reader, "".join("L" if layer % step else "G" for layer in range(1, count + 1))
    )


def _layer_letters(reader: Reader, default: str) -> str:
    """L for each layer with a sliding window, G for the others.

    Args:
        default: the letters if `layer_types` is missing.
    """
    kinds = reader.get("layer_types", None)
    if kinds is None:
        return default
    letters = {"sliding_attention": "L", "full_attention": "G"}
    return reader.letters("layer_types", kinds, letters, len(default))


def _shortest(letters: str) -> str:
    """The shortest pattern that gives these letters when it is repeated.

    >>> _shortest("LLGLLGL")
    'LLG'
    """
    lengths = range(1, len(letters) + 1)
    count = len(letters)
    return next(letters[:n] for n in lengths if (letters[:n] * -(-count // n))[:count] == letters)


def _rope_object(reader: Reader, key: str) -> dict[str, Any] | None:
    value = reader.get(key)
    if value is not None and not isinstance(value, dict):
        raise reader.error(key, value, "expected an object or null")
    return value


def _rotary_base(reader: Reader, base: Any) -> int:
    # Whole numbers up to 2^53 are fp64 numbers.
    if not is_number(base) or not 1 <= base <= 2**53 or base % 1:
        raise reader.error("rope_theta", base, "expected a whole number of 1 to 2^53")
    return int(base)


# Keys of a rope scaling by its kind: those that must be there, and those that may be.
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim"),
    ),
    "longrope": (
        ("original_max_position_embeddings", "short_factor", "long_factor"),
        ("factor", "attention_factor"),
    ),
    "proportional": ((), ("factor", "partial_rotary_factor")),
    # The others have no effect.
    "ntk": (("alpha",), ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")),
}
# With multi-latent attention, as DeepSeek-V3 has it.
_LATENT_YARN = (
    *("factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)


def _rope_scaling(reader: Reader, rope: Values) -> RopeScaling:
    given = (str(rope.pop(name)) for name in ("rope_type", "type") if name in rope)
    names = {reader.family.rope_names.get(name, name) for name in given}
    kind = names.pop() if len(names) == 1 else "" if names else "default"
    if kind == "default" and not rope:
        return RopeScaling()
    latent = "kv_lora_rank" in reader.keys
    # Of one family each.
    own = reader.family.rope_names.values()
    others = tuple(
        name for name in _ROPE_KEYS if name not in ("ntk", "proportional") or name in own
    )
    kinds = ("yarn",) if latent else others
    if kind not in kinds:
        raise reader.error(
            "rope_scaling",
            {"rope_type": kind, **rope},
            f"megapack trains default and {', '.join(kinds)} for this family: set rope_scaling to "
            "null if the model was trained without it",
        )
    required, others = (_LATENT_YARN, ()) if latent else _ROPE_KEYS[kind]
    if reader.get("original_max_position_embeddings", None) is not None:
        # transformers takes this one if both are there (Phi-3).
        rope["original_max_position_embeddings"] = reader.count(
            "original_max_position_embeddings", 1
        )
    rope = {name: value for name, value in rope.items() if value is not None}
    for name in (*required, *rope):
        if name not in (*required, *others):
            advice = "megapack does not know this key of rope_scaling: remove it if it has no "
            raise reader.error(f"rope_scaling.{name}", rope[name], f"{advice}effect")
        rope[name] = _rope_value(reader, name, rope.get(name))
    if kind == "longrope" and "factor" not in rope:
        positions = reader.count("max_position_embeddings", 1)
        rope["factor"] = max(1.0, positions / rope["original_max_position_embeddings"])
    if kind == "yarn" and not latent:
        _set_attention_factor(rope)
    if kind == "ntk":
        rope = {"factor": rope["alpha"]}
    if "partial_rotary_factor" in rope:
        rope["rotated_part"] = rope.pop("partial_rotary_factor")
    try:
        return RopeScaling(kind=kind, **rope)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{reader.folder}: {FILE}: {error}") from None


def _rope_value(reader: Reader, name: str, value: Any) -> Any:
    """The value of a key of rope_scaling, by its type."""
    if name == "truncate" and type(value) is bool:
        return value
    has_list = name in ("short_factor", "long_factor")
    numbers = value if isinstance(value, list | tuple) else [value]
    is_list = isinstance(value, list | tuple)
    if is_list is not has_list or not all(map(is_number, numbers)):
        expected = "a list of numbers" if has_list else "a number"
        raise reader.error(f"rope_scaling.{name}", value, f"expected {expected}")
    if has_list:
        return tuple(map(float, numbers))
    if name != "original_max_position_embeddings":
        return float(value)
    if value < 1 or value % 1:
        raise reader.error(f"rope_scaling.{name}", value, "expected a whole number of at least 1")
    return int(value)


def _set_attention_factor(rope: Values) -> None:
    """The scale of rotated channels by the two weights of log(factor), if they are there."""
    weights = [rope.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    # RopeScaling refuses other factors.
    if "attention_factor" not in rope and all(weights) and rope["factor"] > 0:
        one, other = (0.1 * weight * math.log(rope["factor"]) + 1 for weight in weights)
        rope["attention_factor"] = one / other if other else math.inf


def window(reader: Reader) -> Values:
    """A sliding window in all layers (Mistral), or none."""
    letters = "L" * reader.count("num_hidden_layers", 1)
    return _windows(reader, reader.optional_count("sliding_window"), letters)


def layered_window(reader: Reader) -> Values:
    """A sliding window in local layers (Gemma 3, OLMo-3)."""
    return _windows(reader, reader.optional_count("sliding_window"), _local_layers(reader))


def alternating_window(reader: Reader) -> Values:
    """A sliding window in every other layer, from the first on (gpt-oss)."""
    count = reader.count("num_hidden_layers", 1)
    letters = _layer_letters(reader, ("LG" * count)[:count])
    return _windows(reader, reader.optional_count("sliding_window"), letters)


def switched_window(reader: Reader) -> Values:
    """The window of Qwen, which `use_sliding_window` switches on; the first layers have none."""
    reader.known |= {"sliding_window", "max_window_layers"}
    count = reader.count("num_hidden_layers", 1)
    window = None
    first = count
    if reader.flag("use_sliding_window", False):
        window = reader.optional_count("sliding_window", None)
    if window is not None and reader.get("layer_types", None) is None:
        first = min(reader.count("max_window_layers"), count)
    letters = _layer_letters(reader, "G" * first + "L" * (count - first))
    if window is None and "L" in letters:
        kinds = reader.get("layer_types", None)
        raise reader.error("layer_types", kinds, "use_sliding_window is false: make them agree")
    return _windows(reader, window, letters)


def no_window(reader: Reader) -> Values:
    """Qwen's experts, whose layers with windows differ between versions of transformers."""
    reader.require("use_sliding_window", False)
    return switched_window(reader)


def _windows(reader: Reader, window: int | None, letters: str) -> Values:
    """The sliding window of the layers L; none if no sample reaches it."""
    positions = reader.count("max_position_embeddings", 1)
    if window is None or window >= positions or "L" not in letters:
        return {}
    return {
        "attention_window": window,
        "attention_window_pattern": _shortest(letters) if "G" in letters else None,
    }


def attention_scale(reader: Reader) -> Values:
    """The scale of Gemma's scores, if it is not that of the width of a head."""
    scale = reader.number("query_pre_attn_scalar")
    return {} if scale == reader.count("head_dim", 1) else {"attention_scale": scale**-0.5}


def global_heads(reader: Reader) -> Values:
    """The heads of layers without a window (Gemma 4).

    Transformers 5.23 writes them layer by layer, as `per_layer_config`.
    """
    letters = _local_layers(reader)
    if letters[-1] != "G" or "L" not in letters:
        why = "megapack trains layers of both kinds, of which the last is full_attention"
        raise reader.error("layer_types", reader.get("layer_types", None), why)
    width = reader.count("global_head_dim", 1)
    groups = reader.optional_count("num_global_key_value_heads")
    is_shared = reader.flag("attention_k_eq_v")
    by_layer = reader.get("per_layer_config", None)
    if by_layer is not None:
        own = _alike_layers(reader, by_layer, letters)
        width = own.get("head_dim") or reader.count("head_dim", 1)
        groups = own.get("num_key_value_heads")
    elif not is_shared:
        # transformers reads their number only with shared projections.
        groups = None
    return {
        "global_kv_channels": width,
        "global_query_groups": groups,
        "global_keys_as_values": is_shared,
    }


def _alike_layers(reader: Reader, by_layer: Any, letters: str) -> dict[str, int]:
    """The sizes that all layers G have in `per_layer_config`, and no others."""
    numbers = [str(layer) for layer, letter in enumerate(letters) if letter == "G"]
    if isinstance(by_layer, dict) and sorted(by_layer) == sorted(numbers):
        own = by_layer[numbers[0]]
        are_sizes = isinstance(own, dict) and all(
            key in ("head_dim", "num_key_value_heads") and type(size) is int and size > 0
            for key, size in own.items()
        )
        if are_sizes and all(other == own for other in by_layer.values()):
            return dict(own)
    why = "expected head_dim and num_key_value_heads of the full_attention layers, all alike"
    raise reader.error("per_layer_config", by_layer, why)


def no_layer_embeddings(reader: Reader) -> Values:
    """Refuse what only Gemma 4's smallest models have."""
    reasons = {
        "hidden_size_per_layer_input": "embeddings of each layer (Gemma 4 E2B and E4B), which "
        "megapack's models do not have",
        "num_kv_shared_layers": "layers that take keys and values of others (Gemma 4 E2B and E4B), "
        "which Megatron-Core's do not",
    }
    for key, why in reasons.items():
        if reader.get(key) not in (0, None):
            raise reader.error(key, reader.get(key), f"it has {why}; 0 is trained only")
    return {}


def full_attention(reader: Reader) -> Values:
    """The kinds of layers as MiniMax-M2's remote code has them, 1 for softmax attention."""
    kinds = reader.get("attn_type_list", None)
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise reader.error("attn_type_list", kinds, "megapack trains 1 only, softmax attention")
    return {}


def rotary_width(reader: Reader) -> Values:
    """The channels of a head that are rotated, where the file counts them."""
    width = reader.optional_count("rotary_dim", None)
    if width is None:
        return {}
    percent = width / reader.count("head_dim", 1)
    if percent > 1:
        raise reader.error("rotary_dim", width, "expected at most head_dim")
    if reader.get("partial_rotary_factor") not in (None, percent):
        raise reader.error("rotary_dim", width, "partial_rotary_factor says otherwise: keep one")
    return {"rotary_percent": percent}


def own_head_width(reader: Reader) -> Values:
    """Heads whose width does not follow from the hidden size, so that null is no width."""
    reader.count("head_dim", 1)
    return {}


def latent_attention(reader: Reader) -> Values:
    widths = reader.counts("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    nope, rope = widths["qk_nope_head_dim"], widths["qk_rope_head_dim"]
    reader.require("head_dim", None, rope)
    reader.require("qk_head_dim", nope + rope)
    reader.require("num_key_value_heads", reader.count("num_attention_heads", 1), None)
    has_queries = reader.get("q_lora_rank") is not None
    return {
        **widths,
        "kv_channels": None,
        "q_lora_rank": reader.count("q_lora_rank", 1) if has_queries else None,
        "qk_layernorm": True,
        # transformers normalises the compressed ones with 1e-6 whatever the other norms have.
        "latent_norm_epsilon": None if reader.number("rms_norm_eps") == 1e-6 else 1e-6,
    }


def indexer(reader: Reader) -> Values:
    """The indexers of DeepSeek-V3.2, one in each layer."""
    layers = reader.count("num_hidden_layers", 1)
    dense = reader.count("first_k_dense_replace")
    why = "megapack trains indexed_attention only"
    reader.require("layer_types", None, ["indexed_attention"] * layers, why=why)
    mlps = ["dense"] * dense + ["sparse"] * (layers - dense)
    why = f"megapack trains dense layers only in the first {dense} layers, first_k_dense_replace"
    reader.require("mlp_layer_types", None, mlps, why=why)
    return {}


def own_indexers(reader: Reader) -> Values:
    """An indexer in each layer, and none that takes the choice of an earlier layer."""
    layers = reader.count("num_hidden_layers", 1)
    why = "megapack trains layers with an indexer each, not those that take another layer's choice"
    reader.require("indexer_types", None, ["full"] * layers, why=why)
    reader.require("index_topk_pattern", None, "F" * layers, why=why)
    reader.require("index_topk_freq", 1, None, why=why)
    return {}
