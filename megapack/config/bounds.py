"""The least value of a key, and keys that would have no effect."""

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


def without_effect(config: Any, section: str, where: str, *names: str) -> None:
    """Raise ConfigError for the first of these fields that is not its default.

    Args:
        where: why it has no effect, and what to set.
    """
    for name in names:
        value = getattr(config, name)
        if value != getattr(type(config), name):
            raise ConfigError(f"{section}.{name}={value} has no effect {where}, or leave it out")
