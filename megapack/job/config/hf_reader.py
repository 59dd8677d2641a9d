"""The keys of one config.json: read by type, checked against their family, noted as known."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

from megapack.cost.options import ModelOptions
from megapack.errors import ConfigError, brief
from megapack.job.config.hf_tensors import OUTER, STACKED, Mtp, Names

FILE = "config.json"
_TYPES = typing.get_type_hints(ModelOptions)
MISSING = object()
"""Stands for a default that is not given."""

Values = dict[str, Any]
"""Keys of `ModelConfig` and their values."""

MOST = 2**31 - 1
"""Largest whole number of a file."""
# Far above any model: of each layer is made a letter or a name.
_MOST_LAYERS = 10_000
_MOST = {
    "num_hidden_layers": _MOST_LAYERS,
    "first_k_dense_replace": _MOST_LAYERS,
    "num_nextn_predict_layers": 64,
    "mtp_num_hidden_layers": 64,
}

# What transformers assumes in most families if a key is missing.
OPTIONAL: Values = {
    "head_dim": None,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "partial_rotary_factor": None,
}
# Keys of all families that are harmless with these values, unless a family reads them.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("attention_bias", "attention_out_bias", "lm_head_bias", "mamba_proj_bias"),
            *("mlp_bias", "mtp_use_dedicated_embeddings", "position_embedding_xdrope"),
            *("residual_in_fp32", "use_bias", "use_cla", "use_mla", "use_mrope"),
            "use_sliding_window",
        ),
        (False,),
    ),
    **dict.fromkeys(
        ("embd_pdrop", "hidden_dropout", "resid_pdrop", "router_jitter_noise"), (0.0, 0)
    ),
    **dict.fromkeys(
        ("decoder_sparse_step", "full_attn_mod", "interpolate_factor", "moe_layer_freq"), (1,)
    ),
    **dict.fromkeys(("attn_logit_softcapping", "clip_qkv", "moe_latent_size"), (None,)),
    **dict.fromkeys(("final_logit_softcapping", "sliding_window"), (None,)),
}
# Keys that have no effect on training, in all families.
UNUSED = (
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "return_dict"),
    *("pretraining_tp", "ep_size", "cache_implementation"),
    # Losses of transformers' own trainer; megapack's is model.moe_balance_loss_coef.
    *("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux"),
)
# Keys of a multimodal model beside its text part.
VISION_KEYS = (
    *("text_config", "vision_config", "audio_config", "language_model_only"),
    *("mm_tokens_per_image", "vision_soft_tokens_per_image"),
    *("vision_start_token_id", "vision_end_token_id", "vision_token_id"),
    *(
        f"{token}_token_{kind}"
        for token in ("boi", "eoi", "image", "video", "boa", "eoa", "audio")
        for kind in ("id", "index")
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """What a family's `vision_config` has in addition to the keys of all towers."""

    activation: str
    """Its only `hidden_act`."""
    sizes: tuple[str, ...]
    """Keys of whole numbers."""
    blocks: tuple[str, ...] = ()
    """Keys of lists of blocks."""
    is_interleaved: bool = True
    """Whether the pairs of frames, rows and columns alternate in the decoder's heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What config.json may say of the models of one `model_type`, and what their folders name
    their tensors."""

    architecture: str
    """The only class of transformers."""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Key of config.json -> key of `ModelConfig`, see `Reader.options`."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Key of config.json -> what transformers assumes if the key is missing."""
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Key of config.json -> its only values, in addition to `NEUTRAL`; it may be missing."""
    on: tuple[str, ...] = ()
    """Keys whose only value is true; they may be missing."""
    unused: tuple[str, ...] = ()
    """Keys without effect on training, in addition to `UNUSED`."""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of `ModelConfig` that all models of the family have."""
    is_partly_rotated: bool = False
    """Whether transformers reads `partial_rotary_factor`."""
    unused_rope: tuple[str, ...] = ()
    """Keys of the rotary embedding without effect on text."""
    rope_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other names of kinds of `rope_scaling`."""
    common: Callable[[Reader], Values] | None = None
    """Reads sizes, norms and rotary embeddings; None = `hf_parts.common`."""
    in_text_config: bool = False
    """Whether the keys are those of `text_config`, beside a vision model's."""
    may_be_flat: bool = False
    """With `in_text_config`: whether transformers 4 wrote them at the top level."""
    text_ties: bool | None = None
    """What transformers writes as the text part's `tie_word_embeddings` whatever the model is. That
    at the top level counts."""
    tower: Tower | None = None
    """What encodes images; None = none that megapack trains."""
    parts: tuple[Callable[[Reader], Values], ...] = ()
    """Functions that take several keys together."""
    tensors: Names = dataclasses.field(default_factory=dict)
    """Names of tensors of layers, in addition to `hf_tensors.COMMON` or in place of its own."""
    outer: Mapping[str, str] = dataclasses.field(default_factory=lambda: OUTER)
    """Megatron's name -> the folder's, of the embedding and the last norm."""
    stacked: Mapping[str, str] = dataclasses.field(default_factory=lambda: STACKED)
    """Megatron's name in an expert -> the tensor of all of a layer's experts, in folders that stack
    them."""
    has_expert_columns: bool = False
    """Whether experts are always stacked, with Megatron's rows as columns, of which those of the
    gate and those of what it multiplies alternate."""
    by_key_head: bool = False
    """Whether a gated delta net's input projection has its parts of each key head in turn."""
    single_rows: tuple[str, ...] = ()
    """Megatron's vectors that are a matrix of one row in the folder."""
    has_blocks: bool = True
    """Whether a layer is attention and an MLP, which are two layers of a HybridModel."""
    mtp: Mtp | None = None
    """Names of multi-token prediction, which transformers does not have; None = none that megapack
    builds."""
    kept: tuple[str, ...] = ()
    """How names of other tensors begin that an export copies, in addition to a vision model's."""


class Reader:
    """The keys of one config.json; it notes which have been read.

    Args:
        part: stands before the keys' names in errors.
    """

    def __init__(
        self, folder: str, keys: Mapping[str, Any], family: Family, *, part: str = ""
    ) -> None:
        self.folder = folder
        self.keys = keys
        self.family = family
        self.part = part
        self.known: set[str] = set()

    def get(self, key: str, default: Any = MISSING) -> Any:
        """The value of a key; its default, or the family's, if it is missing."""
        self.known.add(key)
        default = {**OPTIONAL, **self.family.defaults}.get(key, default)
        value = self.keys.get(key, default)
        if value is MISSING:
            raise ConfigError(
                f"{self.folder}: {FILE} has no {self.part}{key}; transformers would assume a "
                "value: write it into the file"
            )
        return value

    def count(self, key: str, least: int = 0, default: Any = MISSING) -> int:
        """A whole number."""
        value = self.get(key, default)
        most = _MOST.get(key, MOST)
        if type(value) is not int or value < least:
            raise self.error(key, value, f"expected a whole number of at least {least}")
        if value > most:
            raise self.error(key, value, f"expected at most {most}")
        return value

    def counts(self, *keys: str) -> dict[str, int]:
        """Whole numbers of at least 1, of keys that options are called by, too."""
        return {key: self.count(key, 1) for key in keys}

    def optional_count(self, key: str, default: Any = MISSING) -> int | None:
        """A whole number of at least 1, or null."""
        return None if self.get(key, default) is None else self.count(key, 1)

    def number(self, key: str, default: Any = MISSING) -> float:
        """A number above 0."""
        value = self.get(key, default)
        if not is_number(value) or not value > 0:
            raise self.error(key, value, "expected a number above 0")
        return float(value)

    def flag(self, key: str, default: Any = MISSING) -> bool:
        """True or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "expected true or false")
        return value

    def options(self, keys: Mapping[str, str]) -> Values:
        """The values of keys for options, read by the options' types.

        Whole numbers are at least 1, others above 0; caps may be null.
        """
        return {own: self._option(key, own) for key, own in keys.items()}

    def _option(self, key: str, own: str) -> Any:
        if own.endswith("_cap") and self.get(key) is None:
            return None
        if _TYPES[own] is bool:
            return self.flag(key)
        is_whole = _TYPES[own] in (int, int | None)
        return self.count(key, 1) if is_whole else self.number(key)

    def letters(self, key: str, kinds: Any, letters: Mapping[str, str], count: int = 0) -> str:
        """The letters of a list of kinds of layers.

        Args:
            count: of layers; 0 = any number.
        """
        counts = [count] if count else range(1, _MOST_LAYERS + 1)
        is_list = isinstance(kinds, list) and len(kinds) in counts
        if not is_list or any(not isinstance(kind, str) or kind not in letters for kind in kinds):
            raise self.error(key, kinds, f"expected {count or 'a list'} of {', '.join(letters)}")
        return "".join(letters[kind] for kind in kinds)

    def layers(self, key: str) -> set[int]:
        """Numbers of layers; none if the key is missing or null."""
        numbers = self.get(key, None) or []
        if not isinstance(numbers, list) or any(type(one) is not int for one in numbers):
            raise self.error(key, numbers, "expected a list of layers")
        return set(numbers)

    def require(self, key: str, *values: Any, why: str = "") -> None:
        """Check that a key is missing or has one of these values."""
        value = self.get(key, values[0])
        # By type too, because 1 == True in Python.
        if not any(type(value) is type(one) and value == one for one in values):
            shown = " or ".join(json.dumps(one) for one in values)
            raise self.error(key, value, why or f"megapack trains {shown} only")

    def error(self, key: str, value: Any, advice: str) -> ConfigError:
        """The error of a key."""
        return ConfigError(f"{self.folder}: {FILE} has {self.part}{key}={shown(value)}; {advice}")


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def shown(value: Any) -> str:
    """A value of config.json as it is written there, shortened."""
    try:
        return brief(value) if isinstance(value, dict | list) else json.dumps(value)[:80]
    except TypeError:
        return brief(value)
