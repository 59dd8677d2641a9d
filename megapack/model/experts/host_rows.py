"""Routers of a host's experts on shared rows.

Megatron's balancing losses, its z-loss and its counts for the expert bias treat a row's tokens as
one set. A shared row has a prompt once, and the host's row has it once per answer. So a router
computes the logits of the shared row, and runs on those of the host's row: the losses are the
host's own, and equal logits choose equal experts. Then one of each token's copies is taken.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megapack.model.attention.row import row_view
from megapack.model.head import unwrapped


class Rows(Protocol):
    """A host's row and its shared row on this rank's routers."""

    def to_host(self, values: Tensor) -> Tensor:
        """Values at this rank's tokens of the host's row, from those of the shared row."""

    def to_shared(self, values: Tensor) -> Tensor:
        """The way back."""


class _Router:
    """A router whose losses see the host's rows.

    Each call of its layer tells it the row. If the layer recomputes its experts alone, it is not
    called again in the backward: rows then come back in the order of the forwards.
    """

    def __init__(self, router: Any, recomputes: bool) -> None:
        self._route: Callable[..., tuple[Tensor, Tensor]] = router.routing
        self._recomputes = recomputes
        self._told: list[Rows | None] = []
        self._checkpointed: deque[Rows | None] = deque()

    def tell(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a call of the layer."""
        params = kwargs.get("packed_seq_params")
        self._told[:] = [None if params is None else row_view(params).host]

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """`TopKRouter.routing`: logits [t, 1, E] -> probabilities and choices, [t, E] each."""
        rows = self._next_rows()
        if rows is None:
            return self._route(logits, *args, **kwargs)
        probs, chosen = self._route(rows.to_host(logits), *args, **kwargs)
        # Not every backend gathers bool.
        return rows.to_shared(probs), rows.to_shared(chosen.to(torch.uint8)).to(chosen.dtype)

    def _next_rows(self) -> Rows | None:
        if not self._told:
            return self._checkpointed.popleft()
        rows = self._told.pop()
        if self._recomputes and not torch.is_grad_enabled():
            self._checkpointed.append(rows)
        return rows


@contextlib.contextmanager
def counting_copies(chunks: Sequence[Any]) -> Iterator[None]:
    """Within the block, the chunks' routers count each copy of a shared token.

    A block is one training step of Megatron's schedule: forwards, each with its backward.
    """
    hooks, routers = [], []
    for layer in (module for chunk in chunks for module in unwrapped(chunk).modules()):
        router = getattr(getattr(layer, "mlp", None), "router", None)
        if router is None or not _sees_rows(router):
            continue
        recomputes = [(layer, "recompute_mlp"), (layer.mlp, "moe_layer_recompute")]
        counting = _Router(router, any(getattr(owner, name, False) for owner, name in recomputes))
        hooks.append(layer.register_forward_pre_hook(counting.tell, with_kwargs=True))
        routers.append(router)
        router.routing = counting.routing
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for router in routers:
            del router.routing


def _sees_rows(router: Any) -> bool:
    """Whether what a router computes depends on how often a row has a token."""
    return bool(
        router.is_aux_loss_enabled()
        or router.config.moe_z_loss_coeff
        or router.enable_expert_bias
        or router.routing_type == "sinkhorn"
    )
