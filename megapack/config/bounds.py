"""The least value of a key."""

from __future__ import annotations

from typing import Any

from megapack.errors import ConfigError


def at_least(config: Any, section: str, least: float, *names: str) -> None:
    """Raise ConfigError for the first of these fields that is below `least`; None passes."""
    for name in names:
        value = getattr(config, name)
        # Not `value < least`, which is false for NaN.
        if value is not None and not value >= least:
            key = f"{section}.{name}" if section else name
            raise ConfigError(f"{key} is {value}; set {least} or more")
