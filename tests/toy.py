"""The width of toy models, which benchmarks change."""

from __future__ import annotations

import os

WIDTH_VARIABLE = "MEGAPACK_TOY_WIDTH"


def width_of(toy: int) -> int:
    """The width of a toy model, unless the environment gives another."""
    return int(os.environ.get(WIDTH_VARIABLE, toy))
