"""Names of Megatron's modules, classes and objects, replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within the block, the owner's attributes have these values."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
