"""Experts at a latent width (Nemotron-3 Super), with Megatron's local layers.

    x -> down -> all-to-all -> experts -> all-to-all -> up -+-> the layer's output
    x -> shared expert -------------------------------------+
    x -> router

Megatron's layer expects Transformer Engine's projections down and up, which every tensor-parallel
rank has whole and which project its own tokens. Data-parallel ranks reduce their gradients as those
of dense layers, and tensor-parallel ranks sum them under sequence parallelism.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from megatron.core.transformer.moe import moe_layer

from megapack.base.choices import Kernel
from megapack.model.attention.latent import WholeLinear
from megapack.model.replaced import replaced


def whole_projections(kernel: Kernel) -> AbstractContextManager[None]:
    """Within the block Megatron's layers of experts are built with `WholeLinear`s down and up.

    Args:
        kernel: with "te" they keep Transformer Engine's.
    """
    own = {} if kernel == "te" else {"HAVE_TE": True, "TELinear": _projection}
    return replaced(moe_layer, **own)


def _projection(in_features: int, out_features: int, *, config: Any, **_: Any) -> WholeLinear:
    return WholeLinear(config, out_features, in_features)
