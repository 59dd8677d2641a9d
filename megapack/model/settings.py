"""Settings of Megatron's config that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapack.errors import ConfigError


def refuse_set(config: Any, advice: Mapping[str, str]) -> None:
    """Raise ConfigError for the first of these settings that is set.

    Args:
        advice: name -> why not, and what to set.
    """
    for name, text in advice.items():
        if value := getattr(config, name, None):
            raise ConfigError(f"config.{name}={value} is not supported: {text}")
