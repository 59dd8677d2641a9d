"""Names of Megatron's modules, replaced while a layer is built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    """Within the block, the module's names have these values."""
    given = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(given)
