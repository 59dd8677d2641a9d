"""A weight of a layer by its name, as `ModelOptions.freeze` and checkpoints have it."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

NOT_IN_MUON = (
    *("embedding.*", "output_layer.*", "*norm.weight", "*bias", "*.conv1d.*", "*.A_log", "*.D"),
    *("*.softmax_offset", "*.router.*_scale"),
)
"""Globs of the weights that Megatron's Muon leaves to Adam: those that are no matrices, and the
matrices of the vocabulary."""


class LayerParameters(NamedTuple):
    """Numbers of weights of one layer."""

    split: int
    """Matrices of attention and MLP, with biases, and all of layers G and M but G's norm: split
    over TP."""
    whole: int
    """Norms, routers, projections from hidden states to latents, and those of experts back: on
    every TP rank."""
    experts: int
    """All experts: split over EP and expert TP."""


Split = Literal["split", "whole", "experts"]


class Weight(NamedTuple):
    """A parameter of a layer, or one of each expert."""

    name: str
    """After decoder.layers.N, in Megatron's local layers; {} is the number of the expert."""
    size: int
    kind: Split
    """The field of `LayerParameters` that counts it."""
    copies: int = 1

    def num_left(self, layer: int, frozen: Sequence[str]) -> int:
        """How many of the copies no glob matches."""
        if not frozen:
            return self.copies
        start = f"decoder.layers.{layer}.{self.name}"
        names = (start.format(expert) for expert in range(self.copies))
        return sum(not matches_any(name, frozen) for name in names)


def matches_any(name: str, globs: Sequence[str]) -> bool:
    """Whether a parameter's name in the whole model matches one of `ModelOptions.freeze`."""
    return any(fnmatchcase(name, glob) for glob in globs)
