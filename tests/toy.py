"""The sizes of toy models, which benchmarks and tables change."""

from __future__ import annotations

import os

WIDTH_VARIABLE = "MEGAPACK_TOY_WIDTH"
FEW_LAYERS_VARIABLE = "MEGAPACK_TOY_FEW_LAYERS"


def width_of(toy: int) -> int:
    """The width of a toy model, unless the environment gives another."""
    return int(os.environ.get(WIDTH_VARIABLE, toy))


def few_layers_of(toy: int) -> int:
    """The layers of toy models in cases that need no more, unless the environment gives others."""
    return int(os.environ.get(FEW_LAYERS_VARIABLE, toy))
