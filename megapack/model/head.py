"""The head of a GPT model: its vocabulary projection, taken out so that log-probs can be computed
in chunks, or a linear value head in its place.

A value head gives one number per token. The position that predicts token t + 1 has seen the tokens
up to t: its value is that of the state in which token t + 1 is chosen, so values stand where
log-probs stand. A sample's score is the value at its last token.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megapack.errors import ConfigError, ScheduleError
from megapack.rows.packed import PackedRow
from megapack.rows.segments import sum_by_sample


class DeferredHead:
    """Keeps the weight that the model would have projected its hidden states with."""

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
        """The output layer's forward within `deferred_head`: returns hidden states as they are."""
        self._weight = weight
        return hidden, None


@contextlib.contextmanager
def deferred_head(model: Any) -> Iterator[DeferredHead]:
    """Within the block the model's last stage returns hidden states in place of logits.

    With n layers of multi-token prediction they are [(1 + n) * tokens, ...], depth after depth.

    Args:
        model: a pipeline's last chunk, wrapped (DDP, Float16Module) or not.

    Raises:
        ConfigError: the chunk has no `output_layer`, or one with a bias.
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
    """Within the block the model's config has no MTP layers, so that it needs no labels.

    Its MTP block still runs; its hidden states follow the model's own.
    """
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
        raise ConfigError(f"{type(gpt).__name__} has no output_layer; use a GPTModel")
    if getattr(layer, "bias", None) is not None:
        raise ConfigError(
            "the output layer has a bias, which chunked log-probs do not add; build it without one"
        )
    return layer


class ValueHead(torch.nn.Module):
    """hidden -> 1 in fp32, without a bias; every tensor-parallel rank holds all of it.

    It stands at the model's `output_layer`, so that DDP, optimizer and checkpoints see it.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32))

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Values [..., 1], fp32; with the signature of Megatron's output layer."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float()), None


def replace_output_layer(model: Any) -> None:
    """Give a GPT model a value head; chunks before the last one stay as they are.

    Before DDP wraps the model. All chunks of all ranks are to be built with untied embeddings.

    Raises:
        ConfigError: the embedding is tied to the output layer, which goes.
    """
    gpt = unwrapped(model)
    if gpt.share_embeddings_and_output_weights:
        raise ConfigError(
            "a value head takes the output layer's place, and the embedding is tied to that; set "
            "share_embeddings_and_output_weights=False (model.untie_embeddings=true)"
        )
    if gpt.post_process:
        gpt.output_layer = ValueHead(gpt.config.hidden_size)


def keep_fp32(model: Any) -> None:
    """Undo what Float16Module does to a value head's weight; before DDP."""
    head = getattr(unwrapped(model), "output_layer", None)
    if isinstance(head, ValueHead):
        head.float()


def row_scores(row: PackedRow, values_T: Tensor, cp_group: Any = None) -> Tensor:
    """Each sample's value at its last token, [n]; a collective of the CP group."""
    at_end = row.ends_T
    return sum_by_sample(values_T[at_end], row.sample_of_T[at_end], len(row.samples), cp_group)
