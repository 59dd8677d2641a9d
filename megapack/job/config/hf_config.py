"""Read the architecture of a Hugging Face model from its folder's config.json, strictly.

    config.json -> its family's known keys -> values of `ModelConfig`

Every key of the file must be known to the family: it gives a value of `ModelConfig`, has no effect
on training, or must have the one value that megapack trains exactly. Another key or value is an
error before anything is built: a model that is built almost right trains without complaint.
transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`; both are
read.

The families are those of `hf_families`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapack.base.files import read_whole, text_of
from megapack.config.shipped import download_hint, shipped_model
from megapack.cost.options import NOT_IN_FOLDERS, ModelOptions
from megapack.errors import ConfigError, first_line, reason_of
from megapack.job.config import hf_parts as parts
from megapack.job.config.hf_families import FAMILIES
from megapack.job.config.hf_reader import (
    FILE,
    NEUTRAL,
    UNUSED,
    VISION_KEYS,
    Family,
    Reader,
    Values,
    shown,
)
from megapack.job.config.hf_vision import VisionOptions, read_vision

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
    keys: Mapping[str, Any] = dataclasses.field(repr=False)
    """Those of config.json, with those of its text part at the top level."""

    @functools.cached_property
    def vision(self) -> VisionOptions | None:
        """The tower; None of a model whose images megapack does not encode.

        Raises:
            ConfigError: it is not one that megapack trains.
        """
        return read_vision(self.folder, self.keys, FAMILIES[self.model_type], self.values)

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
        folder: of a Hugging Face model, as `save_pretrained` writes it, or the config.json itself.
            Of `models/NAME` that does not exist the shipped copy is read, see `config.shipped`.

    Raises:
        ConfigError: the folder has no readable config.json, its family is unknown, or a key or a
            value is; the message names the folder, the key and the value.
    """
    name = str(folder)
    keys = _read(name)
    model_type = keys.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        raise ConfigError(
            f"{name}: {FILE} has model_type={shown(model_type)}{_WHY.get(str(model_type), '')}; "
            f"megapack trains {known}"
        )
    if family.in_text_config:
        keys = _with_text_config(name, keys, family)
    reader = Reader(name, keys, family)
    _check_class(reader)
    values = {**_DEFAULTS, **(family.common or parts.common)(reader), **family.values}
    values |= reader.options(family.keys)
    for own_part in family.parts:
        values |= own_part(reader)
    if values["num_experts"] and values["moe_norm_top_k"] and values["moe_top_k"] == 1:
        raise ConfigError(
            f"{name}: {FILE} gives a token one expert, and a normalised score of one expert is 1, "
            "which Megatron-Core does not do"
        )
    for key, only in {**dict.fromkeys(family.on, (True,)), **family.only}.items():
        reader.require(key, *only)
    for key, only in NEUTRAL.items():
        if key not in reader.known:
            reader.require(key, *only)
    num_mtp_layers = _num_mtp_layers(reader)
    _check_all_known(reader)
    return HfConfig(
        folder=name,
        model_type=str(model_type),
        architecture=family.architecture,
        values=values,
        num_mtp_layers=num_mtp_layers,
        keys=keys,
    )


def _num_mtp_layers(reader: Reader) -> int:
    names = reader.family.mtp
    if names is None:
        return 0
    reader.known.update(MTP_KEYS)
    counted = [reader.count(key) for key in MTP_KEYS if reader.keys.get(key) is not None]
    return sum(counted) if counted else names.assumed


def _read(folder: str) -> Mapping[str, Any]:
    path = (shipped_model(folder) or Path(folder)) / FILE
    if Path(folder).is_file():
        path = Path(folder)
    try:
        data = read_whole(path, _MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: {FILE} cannot be read ({reason_of(error)}); give the folder of a Hugging "
            f"Face model{download_hint(folder)}"
        ) from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path}: longer than {_MAX_BYTES} bytes; give a model's {FILE}")
    try:
        keys = json.loads(text_of(data))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not JSON ({first_line(error)}); give a model's {FILE}"
        ) from None
    if not isinstance(keys, dict):
        raise ConfigError(f"{path}: expected an object of keys; give a model's {FILE}")
    return keys


def _with_text_config(folder: str, keys: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The keys of a multimodal model's text part, and those beside it."""
    text = keys.get("text_config")
    if text is None and family.may_be_flat:
        return keys
    if not isinstance(text, dict):
        raise ConfigError(
            f"{folder}: {FILE} has text_config={shown(text)}; expected an object of keys"
        )
    if family.tower is not None:
        # transformers reads it at the top level, and assumes false.
        keys = {"tie_word_embeddings": False, **keys}
    for key in sorted(text.keys() & keys.keys() - {"model_type", "architectures", *UNUSED}):
        is_written = key == "tie_word_embeddings" and text[key] is family.text_ties
        # transformers 4 wrote tokens of images as null into the text part.
        is_none = key in VISION_KEYS and text[key] is None
        if text[key] != keys[key] and not is_written and not is_none:
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
# The architecture where a family says nothing else.
# Families whose layers Megatron-Core does not have.
_WHY = {"kimi_linear": ", and no release of Megatron-Core has Kimi delta attention"}
_DEFAULTS: Values = {
    field.name: field.default
    for field in dataclasses.fields(ModelOptions)
    if field.name not in (*NOT_IN_FOLDERS, "rope_scaling")
}


def _check_all_known(reader: Reader) -> None:
    known = {*reader.known, *UNUSED, *reader.family.unused}
    if reader.family.in_text_config:
        known |= set(VISION_KEYS)
    for key, value in reader.keys.items():
        if key not in known:
            raise reader.error(
                key,
                value,
                f"megapack does not know this key of {reader.family.architecture}: remove it from "
                "the file if it has no effect on the model",
            )
