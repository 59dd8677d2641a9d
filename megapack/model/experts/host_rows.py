"""Routers of a host's experts on shared rows.

Megatron's balancing losses, its z-loss and its counts for the expert bias treat a row's tokens as
one set. A shared row has a prompt once, and the host's row has it once per answer. So a router
computes the logits of the shared row, and runs on those of the host's row: the losses are the
host's own, and equal logits choose equal experts. Then one of each token's copies is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megapack.model.experts.recomputed import RecomputedRows
from megapack.model.head import unwrapped


class Rows(Protocol):
    """A host's row and its shared row on this rank's routers."""

    def to_host(self, values: Tensor) -> Tensor:
        """Values at this rank's tokens of the host's row, from those of the shared row."""

    def to_shared(self, values: Tensor) -> Tensor:
        """The way back."""


@contextlib.contextmanager
def counting_copies(chunks: Sequence[Any], current: Callable[[], Rows | None]) -> Iterator[None]:
    """Within the block, the chunks' routers count each copy of a shared token.

    A block is one training step of Megatron's schedule: forwards, each with its backward.

    Args:
        current: the rows of the forward that runs; None if its row shares nothing.
    """
    modules = (module for chunk in chunks for module in unwrapped(chunk).modules())
    routers = [m for m in modules if hasattr(m, "routing_type") and _sees_rows(m)]
    for router in routers:
        router.routing = partial(_routed, router.routing, RecomputedRows(), current)
    try:
        yield
    finally:
        for router in routers:
            del router.routing


def _routed(
    route: Callable[..., tuple[Tensor, Tensor]],
    recomputed: RecomputedRows,
    current: Callable[[], Rows | None],
    logits: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """`TopKRouter.routing`: logits [t, 1, E] -> probabilities and choices, [t, E] each."""
    rows: Rows | None = recomputed.of_call(current())
    if rows is None:
        return route(logits, *args, **kwargs)
    probs, chosen = route(rows.to_host(logits), *args, **kwargs)
    # Not every backend gathers bool.
    return rows.to_shared(probs), rows.to_shared(chosen.to(torch.uint8)).to(chosen.dtype)


def _sees_rows(router: Any) -> bool:
    """Whether what a router computes depends on how often a row has a token."""
    return bool(
        router.is_aux_loss_enabled()
        or router.config.moe_z_loss_coeff
        or router.enable_expert_bias
        or router.routing_type == "sinkhorn"
    )
