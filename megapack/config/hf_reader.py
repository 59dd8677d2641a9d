"""The keys of one config.json: read by type, checked against their family, noted as known."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from megapack.errors import ConfigError, brief

FILE = "config.json"
MISSING = object()
"""Stands for a default that is not given."""

Values = dict[str, Any]
"""Keys of `ModelConfig` and their values."""

# What transformers assumes in most families if a key is missing.
OPTIONAL: Values = {
    "head_dim": None,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "partial_rotary_factor": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What config.json may say of the models of one `model_type`."""

    architecture: str
    """The only class of transformers."""
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Key of config.json, true or false -> key of `ModelConfig`."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Key of config.json -> what transformers assumes if the key is missing."""
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Key of config.json -> its only values; it may be missing."""
    unused: tuple[str, ...] = ()
    """Keys without effect on training, in addition to `_UNUSED`."""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of `ModelConfig` that all models of the family have."""
    is_partly_rotated: bool = False
    """Whether transformers reads `partial_rotary_factor`."""
    num_mtp_layers: int | None = None
    """Depths of multi-token prediction if the file does not count them; None = the family has none
    that megapack builds."""
    unused_rope: tuple[str, ...] = ()
    """Keys of the rotary embedding without effect on text."""
    rope_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other names of kinds of `rope_scaling`."""
    common: Callable[[Reader], Values] | None = None
    """Reads sizes, norms and rotary embeddings; None = `hf_parts.common`."""
    in_text_config: bool = False
    """Whether the keys are those of `text_config`, beside a vision model's."""
    parts: tuple[Callable[[Reader], Values], ...] = ()
    """Functions that take several keys together."""


class Reader:
    """The keys of one config.json; it notes which have been read."""

    def __init__(self, folder: str, keys: Mapping[str, Any], family: Family) -> None:
        self.folder = folder
        self.keys = keys
        self.family = family
        self.known: set[str] = set()

    def get(self, key: str, default: Any = MISSING) -> Any:
        """The value of a key; its default, or the family's, if it is missing."""
        self.known.add(key)
        default = {**OPTIONAL, **self.family.defaults}.get(key, default)
        value = self.keys.get(key, default)
        if value is MISSING:
            raise ConfigError(
                f"{self.folder}: {FILE} has no {key}; transformers would assume a value: write it "
                "into the file"
            )
        return value

    def count(self, key: str, least: int = 0, default: Any = MISSING) -> int:
        """A whole number."""
        value = self.get(key, default)
        if type(value) is not int or value < least:
            raise self.error(key, value, f"expected a whole number of at least {least}")
        return value

    def optional_count(self, key: str, default: Any = MISSING) -> int | None:
        """A whole number of at least 1, or null."""
        return None if self.get(key, default) is None else self.count(key, 1)

    def number(self, key: str, default: Any = MISSING) -> float:
        """A number above 0."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.error(key, value, "expected a number above 0")
        return float(value)

    def flag(self, key: str, default: Any = MISSING) -> bool:
        """True or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "expected true or false")
        return value

    def require(self, key: str, *values: Any, why: str = "") -> None:
        """Check that a key is missing or has one of these values."""
        value = self.get(key, values[0])
        # By type too, because 1 == True in Python.
        if not any(type(value) is type(one) and value == one for one in values):
            shown = " or ".join(json.dumps(one) for one in values)
            raise self.error(key, value, why or f"megapack trains {shown} only")

    def error(self, key: str, value: Any, advice: str) -> ConfigError:
        """The error of a key."""
        return ConfigError(f"{self.folder}: {FILE} has {key}={shown(value)}; {advice}")


def shown(value: Any) -> str:
    """A value of config.json as it is written there, shortened."""
    try:
        return brief(value) if isinstance(value, dict | list) else json.dumps(value)[:80]
    except TypeError:
        return brief(value)
