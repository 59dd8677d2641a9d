"""Read the architecture of a Hugging Face model from its folder's config.json, strictly.

    config.json -> its family's known keys -> values of `ModelConfig`

Every key of the file must be known to the family: it gives a value of `ModelConfig`, has no effect
on training, or must have the one value that megapack trains exactly. Another key or value is an
error before anything is built: a model that is built almost right trains without complaint.
transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`; both are
read.

A new family is an entry of `FAMILIES`, and must pass the tests against transformers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapack.base.files import read_whole
from megapack.config.hf_reader import FILE, MISSING, Family, Reader, Values, shown
from megapack.config.rope import LLAMA3_POSITIONS, RopeScaling
from megapack.errors import ConfigError, brief

# ORGANISATION/MODEL, as the hub names them.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# The longest published config has 40 KB (quantization by layer).
_MAX_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfConfig:
    """The architecture of a folder's model."""

    folder: str
    model_type: str
    """The family, such as qwen3."""
    architecture: str
    """The class of transformers, such as Qwen3ForCausalLM."""
    values: Mapping[str, Any]
    """Keys of `ModelConfig`, all that describe the architecture."""
    num_mtp_layers: int = 0
    """Layers of multi-token prediction whose weights the folder may have; they are not built."""

    @property
    def file(self) -> str:
        """Path of config.json, for messages."""
        return str(Path(self.folder) / FILE)


def read_hf_config(folder: str | Path) -> HfConfig:
    """Read a folder's config.json.

    Args:
        folder: of a Hugging Face model, as `save_pretrained` writes it.

    Raises:
        ConfigError: the folder has no readable config.json, its family is unknown, or a key or a
            value is; the message names the folder, the key and the value.
    """
    name = str(folder)
    keys = _read(name)
    model_type = keys.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(
            f"{name}: {FILE} has model_type={shown(model_type)}; megapack trains "
            f"{', '.join(FAMILIES)}"
        )
    reader = Reader(name, keys, family)
    _check_class(reader)
    values = {**_DEFAULTS, **_common(reader), **family.values}
    for key, own in family.flags.items():
        values[own] = reader.flag(key)
    for part in family.parts:
        values |= part(reader)
    for key, only in family.only.items():
        reader.require(key, *only)
    _check_all_known(reader)
    return HfConfig(
        folder=name,
        model_type=str(model_type),
        architecture=family.architecture,
        values=values,
        num_mtp_layers=reader.keys.get("num_nextn_predict_layers") or 0,
    )


def _read(folder: str) -> Mapping[str, Any]:
    path = Path(folder) / FILE
    try:
        data = read_whole(path, _MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        advice = "give the folder of a Hugging Face model"
        if _HUB_NAME.fullmatch(folder) and not Path(folder).exists():
            advice += f"; for one of the hub: hf download {folder} --local-dir FOLDER"
        raise ConfigError(f"{folder}: {FILE} cannot be read ({reason}); {advice}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path}: longer than {_MAX_BYTES} bytes; give a model's {FILE}")
    try:
        keys = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not JSON ({brief(str(error))}); give a model's {FILE}"
        ) from None
    if not isinstance(keys, dict):
        raise ConfigError(f"{path}: expected an object of keys; give a model's {FILE}")
    return keys


def value_architecture(architecture: str) -> str:
    """The class of transformers for a model with one value in place of logits.

    >>> value_architecture("Qwen3ForCausalLM")
    'Qwen3ForSequenceClassification'
    """
    return architecture.replace("ForCausalLM", "ForSequenceClassification")


def _check_class(reader: Reader) -> None:
    """Refuse classifiers, quantized weights and remote code that is not the family's."""
    names = reader.get("architectures", None)
    reader.known.add("model_type")
    own = reader.family.architecture
    scores = value_architecture(own)
    if names is not None and names not in ([own], [scores]):
        raise reader.error("architectures", names, f"megapack trains {own} and {scores} only")
    if names == [scores]:
        labels = reader.get("id2label", None)
        if not isinstance(labels, dict) or len(labels) != 1:
            raise reader.error("id2label", labels, "megapack trains classifiers of one label only")
        reader.known.add("label2id")
    reader.require(
        "quantization_config",
        None,
        why="quantized weights cannot be trained: convert the folder to bf16 first, or take the "
        "model's bf16 folder",
    )


# Values of `ModelConfig` where a family says nothing else.
_DEFAULTS: Values = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "qk_layernorm": False,
    "qkv_bias": False,
    "kv_lora_rank": None,
    "q_lora_rank": None,
    "qk_nope_head_dim": None,
    "qk_rope_head_dim": None,
    "v_head_dim": None,
    "num_experts": None,
    # Without experts it has no effect; this is its default.
    "moe_top_k": 2,
    "moe_ffn_hidden_size": None,
    "moe_first_dense_layers": 0,
    "moe_shared_ffn_hidden_size": None,
    "moe_shared_gate": False,
    "moe_score_function": "softmax",
    "moe_norm_top_k": True,
    "moe_num_groups": None,
    "moe_group_top_k": None,
    "moe_route_scale": None,
    "moe_expert_bias": False,
    "hybrid_layer_pattern": None,
    "position_embedding_type": "rope",
    "attention_output_gate": False,
    "layernorm_zero_centered_gamma": False,
    "activation": None,
    "linear_num_key_heads": None,
    "linear_num_value_heads": None,
    "linear_key_head_dim": None,
    "linear_value_head_dim": None,
    "linear_conv_kernel_dim": 4,
    "mamba_num_heads": None,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 8,
}
# Keys that have no effect on training, in all families.
_UNUSED = (
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "return_dict"),
    # The loss of transformers' own trainer; megapack's is model.moe_balance_loss_coef.
    *("output_router_logits", "router_aux_loss_coef"),
)


def _common(reader: Reader) -> Values:
    """The keys of all families."""
    hidden = reader.count("hidden_size", 1)
    heads = reader.count("num_attention_heads", 1)
    reader.require("hidden_act", "silu")
    reader.require("attention_dropout", 0.0, 0, None)
    reader.require("chunk_size_feed_forward", 0)
    head_dim = reader.optional_count("head_dim")
    groups = reader.optional_count("num_key_value_heads")
    return {
        "num_layers": reader.count("num_hidden_layers", 1),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups or heads,
        "kv_channels": head_dim or hidden // heads,
        "ffn_hidden_size": reader.count("intermediate_size", 1),
        "vocab_size": reader.count("vocab_size", 1),
        "max_position_embeddings": reader.count("max_position_embeddings", 1),
        "norm_epsilon": reader.number("rms_norm_eps"),
        "untie_embeddings": not reader.flag("tie_word_embeddings"),
        **_rope(reader),
    }


def _rope(reader: Reader) -> Values:
    """The rotary embedding, from the keys of transformers 4 and 5."""
    given = reader.get("rope_parameters")
    scaling = reader.get("rope_scaling")
    for key, value in (("rope_parameters", given), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, dict):
            raise reader.error(key, value, "expected an object or null")
    if given and scaling not in (None, given):
        raise reader.error("rope_scaling", scaling, "rope_parameters says otherwise: keep one")
    rope = dict(given or scaling or {})
    # Within `rope_parameters` since transformers 5, beside `rope_scaling` before.
    merged = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        inside = rope.pop(key, None)
        outside = reader.get(key, None if inside is not None else MISSING)
        if inside is not None and key in reader.keys and outside != inside:
            raise reader.error(key, outside, "rope_parameters says otherwise: keep one")
        merged[key] = outside if inside is None else inside
    base = merged["rope_theta"]
    if type(base) not in (int, float) or not base >= 1 or base % 1:
        raise reader.error("rope_theta", base, "expected a whole number of at least 1")
    percent = merged["partial_rotary_factor"]
    if percent is not None and type(percent) not in (int, float):
        raise reader.error("partial_rotary_factor", percent, "expected a number")
    if percent not in (None, 1) and not reader.family.is_partly_rotated:
        raise reader.error(
            "partial_rotary_factor",
            percent,
            "transformers rotates whole heads of this family whatever it says: remove the key",
        )
    return {
        "rotary_base": int(base),
        "rotary_percent": 1.0 if percent is None else float(percent),
        "rope_scaling": _rope_scaling(reader, rope),
    }


# Keys of a rope scaling by its kind; all are required.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "llama3": (
        *("factor", "original_max_position_embeddings"),
        *("low_freq_factor", "high_freq_factor"),
    ),
    "yarn": (
        *("factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
}


def _rope_scaling(reader: Reader, rope: Values) -> RopeScaling:
    names = {rope.pop(name) for name in ("rope_type", "type") if name in rope}
    kind = names.pop() if len(names) == 1 else None if names else "default"
    if kind == "default" and not rope:
        return RopeScaling()
    latent = "kv_lora_rank" in reader.keys
    if kind not in _ROPE_KEYS or (kind == "yarn") is not latent:
        kinds = "yarn" if latent else "llama3"
        raise reader.error(
            "rope_scaling",
            {"rope_type": kind, **rope},
            f"megapack trains default and {kinds} for this family: set rope_scaling to null if the "
            "model was trained without it",
        )
    for name in _ROPE_KEYS[kind]:
        if type(rope.get(name)) not in (int, float):
            raise reader.error(f"rope_scaling.{name}", rope.get(name), "expected a number")
    unknown = sorted(set(rope) - set(_ROPE_KEYS[kind]))
    if unknown:
        advice = "megapack does not know this key of rope_scaling: remove it if it has no effect"
        raise reader.error(f"rope_scaling.{unknown[0]}", rope[unknown[0]], advice)
    original = rope.pop("original_max_position_embeddings")
    if kind == "llama3" and original != LLAMA3_POSITIONS:
        raise reader.error(
            "rope_scaling.original_max_position_embeddings",
            original,
            f"Megatron-Core's llama3 scaling has {LLAMA3_POSITIONS} only: use another model",
        )
    numbers = {name: float(value) for name, value in rope.items()}
    try:
        return RopeScaling(
            kind=kind,  # type: ignore[arg-type]
            original_max_position_embeddings=int(original),
            **numbers,
        )
    except ConfigError as error:
        raise ConfigError(f"{reader.folder}: {FILE}: {error}") from None


def _window(reader: Reader) -> Values:
    """No sliding window, or one that no sample reaches (Mistral)."""
    window = reader.get("sliding_window")
    positions = reader.count("max_position_embeddings", 1)
    if window is not None and (type(window) is not int or window < positions):
        raise reader.error(
            "sliding_window",
            window,
            f"attention here has no window: set max_position_embeddings, now {positions}, to "
            f"{shown(window)} to train shorter samples exactly",
        )
    return {}


def _switched_window(reader: Reader) -> Values:
    """The windows of Qwen, which `use_sliding_window` switches on; and the kinds of layers."""
    reader.require("use_sliding_window", False)
    reader.known |= {"sliding_window", "max_window_layers"}
    kinds = reader.get("layer_types", None)
    if kinds is not None and (not isinstance(kinds, list) or set(kinds) - {"full_attention"}):
        raise reader.error("layer_types", kinds, "megapack trains full_attention only")
    return {}


def _own_head_width(reader: Reader) -> Values:
    """Heads whose width does not follow from the hidden size, so that null is no width."""
    reader.count("head_dim", 1)
    return {}


def _top_k(reader: Reader, *names: str) -> Values:
    """The number of experts by one of these names, and how many a token uses."""
    present = [name for name in names if name in reader.keys] or [names[0]]
    counts = {reader.count(name, 1) for name in present}
    if len(counts) > 1:
        raise reader.error(present[0], reader.get(present[0]), f"{present[1]} differs: keep one")
    return {"num_experts": counts.pop(), "moe_top_k": reader.count("num_experts_per_tok", 1)}


def _normed(reader: Reader, top_k: int, normed: bool) -> Values:
    if normed and top_k == 1:
        raise reader.error(
            "num_experts_per_tok",
            1,
            "a normalised score of one expert is 1, which Megatron-Core does not do",
        )
    return {"moe_norm_top_k": normed}


def _mixtral_experts(reader: Reader) -> Values:
    values = _top_k(reader, "num_local_experts")
    values["moe_ffn_hidden_size"] = reader.count("intermediate_size", 1)
    return values | _normed(reader, values["moe_top_k"], True)


def _qwen_experts(reader: Reader) -> Values:
    """Experts after the first dense layers, with softmax scores."""
    values = _top_k(reader, "num_experts", "num_local_experts")
    values["moe_ffn_hidden_size"] = reader.count("moe_intermediate_size", 1)
    reader.require("decoder_sparse_step", 1)
    dense = reader.get("mlp_only_layers", None) or []
    if not isinstance(dense, list) or any(layer not in dense for layer in range(len(dense))):
        raise reader.error("mlp_only_layers", dense, "only the first layers can be dense")
    values["moe_first_dense_layers"] = len(dense)
    return values | _normed(reader, values["moe_top_k"], reader.flag("norm_topk_prob"))


def _qwen2_shared_expert(reader: Reader) -> Values:
    width = reader.count("shared_expert_intermediate_size", 1)
    return {"moe_shared_ffn_hidden_size": width, "moe_shared_gate": True}


def _deepseek_experts(reader: Reader) -> Values:
    """Experts after the first dense layers, sigmoid scores, groups and shared experts."""
    values = _top_k(reader, "n_routed_experts")
    width = reader.count("moe_intermediate_size", 1)
    top_k = values["moe_top_k"]
    groups = reader.count("n_group", 1)
    chosen = reader.count("topk_group", 1)
    if groups > 1 and top_k != 2 * chosen:
        raise reader.error(
            "num_experts_per_tok",
            top_k,
            f"transformers ranks a group by its best 2 experts and Megatron-Core by its best "
            f"num_experts_per_tok / topk_group ({top_k} / {chosen}); they agree at 2 only",
        )
    if not reader.flag("norm_topk_prob"):
        raise reader.error("norm_topk_prob", False, "Megatron-Core normalises sigmoid scores")
    _normed(reader, top_k, True)
    return {
        **values,
        "moe_ffn_hidden_size": width,
        "moe_shared_ffn_hidden_size": width * reader.count("n_shared_experts", 1),
        "moe_first_dense_layers": reader.count("first_k_dense_replace"),
        "moe_num_groups": groups if groups > 1 else None,
        "moe_group_top_k": chosen if groups > 1 else None,
        "moe_route_scale": reader.number("routed_scaling_factor"),
        "moe_score_function": "sigmoid",
        "moe_expert_bias": True,
    }


def _latent_attention(reader: Reader) -> Values:
    nope = reader.count("qk_nope_head_dim", 1)
    rope = reader.count("qk_rope_head_dim", 1)
    rank = reader.get("q_lora_rank")
    reader.require("head_dim", None, rope)
    reader.require("qk_head_dim", nope + rope)
    reader.require("num_key_value_heads", reader.count("num_attention_heads", 1), None)
    # transformers normalises the compressed queries and keys with 1e-6 whatever the layers have.
    reader.require("rms_norm_eps", 1e-6)
    return {
        "kv_channels": None,
        "kv_lora_rank": reader.count("kv_lora_rank", 1),
        "q_lora_rank": None if rank is None else reader.count("q_lora_rank", 1),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": reader.count("v_head_dim", 1),
        "qk_layernorm": True,
    }


def _mtp(reader: Reader) -> Values:
    reader.count("num_nextn_predict_layers", 0, 0)
    return {}


_LLAMA = Family(
    architecture="LlamaForCausalLM",
    defaults={"num_key_value_heads": None, "rope_theta": 10000.0},
    only={"attention_bias": (False,), "mlp_bias": (False,)},
    unused=("pretraining_tp",),
)
_MISTRAL = Family(architecture="MistralForCausalLM", parts=(_window,))
_MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    defaults={"sliding_window": None, "rope_theta": 1e6},
    only={"router_jitter_noise": (0.0, 0)},
    parts=(_window, _mixtral_experts),
)
_QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    only={"use_mrope": (False,)},
    values={"qkv_bias": True},
    parts=(_switched_window,),
)
_QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    only={"qkv_bias": (True,), "use_mrope": (False,)},
    values={"qkv_bias": True},
    parts=(_switched_window, _qwen_experts, _qwen2_shared_expert),
)
_QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    defaults={"head_dim": 128},
    only={"attention_bias": (False,)},
    values={"qk_layernorm": True},
    parts=(_switched_window, _own_head_width),
)
_QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    only={"attention_bias": (False,)},
    values={"qk_layernorm": True},
    parts=(_switched_window, _qwen_experts),
)
_DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    only={
        "attention_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "rope_interleave": (True,),
    },
    unused=("aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "auto_map"),
    parts=(_deepseek_experts, _latent_attention, _mtp),
)
_GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    flags={"attention_bias": "qkv_bias", "use_qk_norm": "qk_layernorm"},
    defaults={"partial_rotary_factor": 0.5},
    is_partly_rotated=True,
    parts=(_deepseek_experts, _mtp),
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
    "glm4_moe": _GLM4_MOE,
}
"""Families by `model_type`."""


def _check_all_known(reader: Reader) -> None:
    known = {*reader.known, *_UNUSED, *reader.family.unused}
    for key, value in reader.keys.items():
        if key not in known:
            raise reader.error(
                key,
                value,
                f"megapack does not know this key of {reader.family.architecture}: remove it from "
                "the file if it has no effect on the model",
            )
