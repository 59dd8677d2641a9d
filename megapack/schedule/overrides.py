"""Settings of Megatron's config that hold during one call of its schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def config_with(config: Any, overrides: dict[str, Any]) -> Iterator[None]:
    """Within the block, Megatron's config has the call's settings instead of the user's."""
    before = {name: getattr(config, name) for name in overrides}
    for name, value in overrides.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
