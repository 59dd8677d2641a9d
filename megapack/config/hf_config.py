"""Read the architecture of a Hugging Face model from its folder's config.json, strictly.

    config.json -> its family's known keys -> values of `ModelConfig`

Every key of the file must be known to the family: it gives a value of `ModelConfig`, has no effect
on training, or must have the one value that megapack trains exactly. Another key or value is an
error before anything is built: a model that is built almost right trains without complaint.
transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`; both are
read.

A new family is an entry of `FAMILIES` or of `hf_hybrid.HYBRID_FAMILIES`, and must pass the tests
against transformers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapack.base.files import read_whole
from megapack.config import hf_parts as parts
from megapack.config.hf_hybrid import HYBRID_FAMILIES, REFUSED
from megapack.config.hf_reader import FILE, Family, Reader, Values, shown
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
    """Depths of multi-token prediction whose weights the folder may have."""

    def values_with_mtp(self, num_mtp_layers: Any) -> Mapping[str, Any]:
        """The values for a model with this number of depths, `ModelConfig.mtp_num_layers`.

        Raises:
            ConfigError: the folder has fewer.
        """
        if type(num_mtp_layers) is not int or num_mtp_layers < 1:
            return self.values
        if num_mtp_layers > self.num_mtp_layers:
            raise ConfigError(
                f"model.mtp_num_layers={num_mtp_layers}, but {self.file} has "
                f"{self.num_mtp_layers} layers of multi-token prediction that megapack trains; set "
                f"{self.num_mtp_layers}"
            )
        pattern = self.values["hybrid_layer_pattern"]
        if pattern is None:
            return self.values
        # A depth is a block with attention, and the last block's kind of MLP.
        depths = f"/*{pattern[-1]}" * num_mtp_layers
        return {**self.values, "hybrid_layer_pattern": pattern + depths}

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
        known = f"megapack trains {', '.join(FAMILIES)}"
        why = _REFUSED.get(model_type, known) if isinstance(model_type, str) else known
        raise ConfigError(f"{name}: {FILE} has model_type={shown(model_type)}; {why}")
    if family.in_text_config:
        keys = _with_text_config(name, keys)
    reader = Reader(name, keys, family)
    _check_class(reader)
    values = {**_DEFAULTS, **(family.common or parts.common)(reader), **family.values}
    for key, own in family.flags.items():
        values[own] = reader.flag(key)
    for own_part in family.parts:
        values |= own_part(reader)
    for key, only in family.only.items():
        reader.require(key, *only)
    num_mtp_layers = _num_mtp_layers(reader)
    _check_all_known(reader)
    return HfConfig(
        folder=name,
        model_type=str(model_type),
        architecture=family.architecture,
        values=values,
        num_mtp_layers=num_mtp_layers,
    )


def _num_mtp_layers(reader: Reader) -> int:
    assumed = reader.family.num_mtp_layers
    if assumed is None:
        return 0
    reader.known.update(MTP_KEYS)
    counted = [reader.count(key) for key in MTP_KEYS if reader.keys.get(key) is not None]
    return sum(counted) if counted else assumed


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


def _with_text_config(folder: str, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a multimodal model's text part, and those beside it."""
    text = keys.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(
            f"{folder}: {FILE} has text_config={shown(text)}; expected an object of keys"
        )
    for key in sorted(text.keys() & keys.keys() - {"model_type", *_UNUSED}):
        if text[key] != keys[key]:
            raise ConfigError(
                f"{folder}: {FILE} has {key}={shown(keys[key])}; text_config says otherwise: make "
                "them equal"
            )
    return {**text, **keys}


def value_architecture(architecture: str) -> str:
    """The class of transformers for a model with one value in place of logits.

    >>> value_architecture("Qwen3ForCausalLM")
    'Qwen3ForSequenceClassification'
    """
    # Without "Text" it is the multimodal one.
    architecture = architecture.replace("Gemma3ForCausalLM", "Gemma3TextForCausalLM")
    return re.sub("For(CausalLM|ConditionalGeneration)$", "ForSequenceClassification", architecture)


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


MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys that count layers of multi-token prediction."""
# Values of `ModelConfig` where a family says nothing else.
_DEFAULTS: Values = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "qk_layernorm": False,
    "qk_layernorm_over_heads": False,
    "norm_placement": "pre",
    "scale_embeddings": False,
    "attention_scale": None,
    "qkv_bias": False,
    "kv_lora_rank": None,
    "q_lora_rank": None,
    "qk_nope_head_dim": None,
    "qk_rope_head_dim": None,
    "indexer_top_k": None,
    "indexer_num_heads": None,
    "indexer_head_dim": None,
    "indexer_rope_interleaved": False,
    "v_head_dim": None,
    "latent_norm_epsilon": None,
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
    "rotary_interleaved": False,
    "local_rotary_base": None,
    "rotary_pattern": None,
    "attention_window": None,
    "attention_window_pattern": None,
    "attention_sinks": False,
    "attention_output_gate": False,
    "layernorm_zero_centered_gamma": False,
    "activation": None,
    "activation_clamp": None,
    "glu_linear_offset": 0.0,
    "linear_bias": False,
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


_LLAMA = Family(
    architecture="LlamaForCausalLM",
    defaults={"num_key_value_heads": None, "rope_theta": 10000.0},
    only={"attention_bias": (False,), "mlp_bias": (False,)},
    unused=("pretraining_tp",),
)
_MISTRAL = Family(architecture="MistralForCausalLM", parts=(parts.window,))
_MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    defaults={"sliding_window": None, "rope_theta": 1e6},
    only={"router_jitter_noise": (0.0, 0)},
    parts=(parts.window, parts.mixtral_experts),
)
_QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    only={"use_mrope": (False,)},
    values={"qkv_bias": True},
    parts=(parts.switched_window,),
)
_QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    only={"qkv_bias": (True,), "use_mrope": (False,)},
    values={"qkv_bias": True},
    parts=(parts.no_window, parts.qwen_experts, parts.gated_shared_expert),
)
_QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    defaults={"head_dim": 128},
    only={"attention_bias": (False,)},
    values={"qk_layernorm": True},
    parts=(parts.switched_window, parts.own_head_width),
)
_QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    only={"attention_bias": (False,)},
    values={"qk_layernorm": True},
    parts=(parts.no_window, parts.qwen_experts),
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
    parts=(parts.deepseek_experts, parts.latent_attention),
    num_mtp_layers=0,
)
_DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    only={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "scoring_func": ("softmax",),
        "moe_layer_freq": (1,),
    },
    unused=_DEEPSEEK_V3.unused,
    parts=(parts.unnormed_experts, parts.latent_attention),
)
_GLM4_MOE_LITE = Family(
    architecture="Glm4MoeLiteForCausalLM",
    defaults={"first_k_dense_replace": 1},
    only={
        "attention_bias": (False,),
        "topk_method": ("noaux_tc",),
        "rope_interleave": (True,),
    },
    unused=("pretraining_tp",),
    parts=(parts.deepseek_experts, parts.dense_first, parts.latent_attention),
    num_mtp_layers=0,
)
_SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    flags={"attention_bias": "qkv_bias"},
    only={"attention_out_bias": (False,), "mlp_bias": (False,)},
    # Published with rates of 0.1; megapack trains without dropout, as the model is evaluated.
    unused=("pretraining_tp", "attention_dropout", "residual_dropout"),
)
_ERNIE4_5 = Family(
    architecture="Ernie4_5ForCausalLM",
    defaults={"tie_word_embeddings": True, "head_dim": 128, "rope_theta": 500000.0},
    only={"use_bias": (False,)},
    values={"rotary_interleaved": True},
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
    only={
        "qk_norm_type": ("per_layer",),
        "router_jitter_noise": (0.0, 0),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "sliding_window": (None,),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    },
    # Published folders have no weights of multi-token prediction.
    unused=("auto_map", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp"),
    values={"qk_layernorm": True, "qk_layernorm_over_heads": True},
    is_partly_rotated=True,
    parts=(parts.full_attention, parts.rotary_width, parts.biased_experts),
)
# Qwen2 with layers of multi-token prediction, as remote code.
_MIMO = Family(
    architecture="MiMoForCausalLM",
    only={"attention_bias": (True,)},
    unused=("auto_map",),
    values={"qkv_bias": True},
    num_mtp_layers=0,
    parts=(parts.no_window,),
)
_DEEPSEEK_V32 = Family(
    architecture="DeepseekV32ForCausalLM",
    only={**_DEEPSEEK_V3.only, "mlp_bias": (False,)},
    unused=_DEEPSEEK_V3.unused,
    parts=(*_DEEPSEEK_V3.parts, parts.indexer),
    num_mtp_layers=0,
)
_GLM_MOE_DSA = Family(
    architecture="GlmMoeDsaForCausalLM",
    only={**_DEEPSEEK_V32.only, "indexer_rope_interleave": (True,)},
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
    parts=(parts.deepseek_experts,),
)
_OLMO_NORMS: Values = {
    "qk_layernorm": True,
    "qk_layernorm_over_heads": True,
    "norm_placement": "post",
}
_OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    defaults={"num_key_value_heads": None},
    only={"attention_bias": (False,), "clip_qkv": (None,)},
    values=_OLMO_NORMS,
)
_OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    defaults={"num_key_value_heads": None, "rope_theta": 5e5, "sliding_window_pattern": 4},
    only={"attention_bias": (False,), "clip_qkv": (None,)},
    values=_OLMO_NORMS,
    common=parts.layered,
    parts=(parts.layered_window,),
)
_PHI3 = Family(
    architecture="Phi3ForCausalLM",
    defaults={"num_key_value_heads": None, "rope_theta": 10000.0, "sliding_window": None},
    only={
        "attention_bias": (False,),
        "lm_head_bias": (False,),
        "mlp_bias": (False,),
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


_GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    defaults={"query_pre_attn_scalar": 256, "sliding_window_pattern": 6},
    only={
        "attention_bias": (False,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False, None),
    },
    unused=("cache_implementation", "_sliding_window_pattern"),
    values={
        "activation": "gelu_tanh",
        "layernorm_zero_centered_gamma": True,
        "norm_placement": "sandwich",
        "qk_layernorm": True,
        "scale_embeddings": True,
    },
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
_GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    defaults={"swiglu_limit": 7.0},
    only={"attention_bias": (True,), "swiglu_alpha": (1.702,)},
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
        *(parts.alternating_window, parts.clamped_experts),
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
    "mimo": _MIMO,
    "olmo2": _OLMO2,
    "olmo3": _OLMO3,
    "phi3": _PHI3,
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3_VISION,
    "gpt_oss": _GPT_OSS,
    **HYBRID_FAMILIES,
}
"""Families by `model_type`."""


_REFUSED: Mapping[str, str] = {
    **REFUSED,
    "deepseek_v4": "its layers compress keys over windows of tokens and mix several hidden states "
    "per token, which megapack's layers do not",
    "ernie4_5_moe": "it chooses experts by softmax scores plus a bias, and Megatron-Core's router "
    "adds a bias to sigmoids only",
    "gemma2": "it caps attention scores and logits by a tanh, which no attention here does",
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
        "its layers have heads of two widths, or take keys and values of other layers, which "
        "Megatron-Core's have not",
    ),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"),
        "it normalises queries and keys after rotating them, Megatron-Core before",
    ),
}
"""Families that Megatron-Core or megapack cannot build, with the reason."""


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
