"""Taking the vocabulary projection out of a GPT model, so that log-probs can be made in chunks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megapack.errors import ScheduleError


class DeferredHead:
    """What the model would have projected: hidden states and the weight, kept for later."""

    def __init__(self, output_layer: Any) -> None:
        self.output_layer = output_layer
        self._weight: Tensor | None = None

    @property
    def weight_VH(self) -> Tensor:
        """This rank's slice of the vocabulary projection (of the tied embedding if it is tied)."""
        weight = self.output_layer.weight if self._weight is None else self._weight
        if weight is None:
            raise ScheduleError("the model's output layer was not reached, or has no weight")
        return weight  # type: ignore[no-any-return]

    def capture(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Any, None]:
        """Stands in for the output layer's forward."""
        self._weight = weight
        return hidden, None


@contextlib.contextmanager
def deferred_head(model: Any) -> Iterator[DeferredHead]:
    """Within the block the model's last stage returns hidden states in place of logits.

    With n layers of multi-token prediction they are [(1 + n) * tokens, ...], depth after depth.

    Args:
        model: a pipeline's last chunk, wrapped (DDP, Float16Module) or not.

    Raises:
        ScheduleError: the chunk has no `output_layer` without a bias.
    """
    layer = find_output_layer(model)
    head = DeferredHead(layer)
    patched = vars(layer).get("forward")
    layer.forward = head.capture
    try:
        with _without_mtp_losses(unwrapped(model)):
            yield head
    finally:
        if patched is None:
            del layer.forward
        else:
            layer.forward = patched


@contextlib.contextmanager
def _without_mtp_losses(gpt: Any) -> Iterator[None]:
    """With no MTP layers in its config the model asks for no labels; its MTP block runs all the
    same, and what it makes is kept behind the model's own hidden states."""
    config = getattr(gpt, "config", None)
    if not getattr(config, "mtp_num_layers", None):
        yield
        return
    gpt.config = copy.copy(config)
    gpt.config.mtp_num_layers = None
    try:
        yield
    finally:
        gpt.config = config


def unwrapped(model: Any) -> Any:
    """The model inside DDP, Float16Module and the like."""
    while hasattr(model, "module"):
        model = model.module
    return model


def find_output_layer(model: Any) -> Any:
    """The vocabulary projection of a pipeline's last chunk."""
    gpt = unwrapped(model)
    layer = getattr(gpt, "output_layer", None)
    if layer is None:
        raise ScheduleError(f"{type(gpt).__name__} has no output_layer; a GPTModel has one")
    if getattr(layer, "bias", None) is not None:
        raise ScheduleError("the output layer has a bias, which chunked log-probs do not add")
    return layer
