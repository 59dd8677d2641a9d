"""The head of a GPT model: a vocabulary projection that is deferred, or a linear value head.

Deferring the projection lets log-probs be computed in chunks. A value head gives one number per
token. The position that predicts token t + 1 has seen the tokens up to t, so its value is that of
the state in which token t + 1 is chosen: values are at the same positions as log-probs. A sample's
score is the value at its last token.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megapack.errors import ConfigError, ScheduleError
from megapack.model.fp32 import mark_fp32
from megapack.model.replaced import replaced
from megapack.rows.packed import PlacedRow
from megapack.rows.segments import sum_by_sample


class DeferredHead:
    """The projection that was skipped: its layer, and the weight that the model passed to it."""

    def __init__(self, output_layer: Any) -> None:
        self.output_layer = output_layer
        self._weight: Tensor | None = None

    @property
    def weight_VH(self) -> Tensor:
        """This rank's slice of the vocabulary projection, or of the embedding if both are tied."""
        weight = self.output_layer.weight if self._weight is None else self._weight
        if weight is None:
            raise ScheduleError("the model's output layer was not reached, or has no weight")
        return weight  # type: ignore[no-any-return]

    @property
    def tied(self) -> bool:
        """Whether the model passed a weight of its own: the embedding's."""
        return self._weight is not None

    def capture(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Any, None]:
        """The output layer's forward within `deferred_head`: return the hidden states unchanged."""
        self._weight = weight
        return hidden, None


@contextlib.contextmanager
def deferred_head(model: Any) -> Iterator[DeferredHead]:
    """Within the block the model's last stage returns hidden states instead of logits.

    With n layers of multi-token prediction their shape is [(1 + n) * tokens, ...]: those of the
    model, then those of each depth.

    Args:
        model: a pipeline's last chunk, wrapped (DDP, Float16Module) or not.

    Raises:
        ConfigError: the chunk has no `output_layer`, or one with a bias.
    """
    layer = find_output_layer(model)
    head = DeferredHead(layer)
    gpt = unwrapped(model)
    hidden: dict[str, Any] = {}
    if getattr(getattr(gpt, "config", None), "mtp_num_layers", None):
        # The MTP block still runs, and the model asks for no labels of its losses.
        hidden["config"] = copy.copy(gpt.config)
        hidden["config"].mtp_num_layers = None
    with replaced(layer, forward=head.capture), replaced(gpt, **hidden):
        yield head


def unwrapped(model: Any) -> Any:
    """The model inside wrappers such as DDP and Float16Module."""
    while hasattr(model, "module"):
        model = model.module
    return model


def layer_letters(model: Any) -> tuple[str, str] | None:
    """The letters of a HybridModel whose layers are attention or an MLP alone: of all its layers,
    and of a depth of multi-token prediction. None for others."""
    pattern: str | None = getattr(unwrapped(model), "hybrid_layer_pattern", None)
    if pattern is None:
        return None
    layers, _, depths = pattern.replace("|", "").partition("/")
    return layers, depths.rpartition("/")[2]


def find_output_layer(model: Any) -> Any:
    """The vocabulary projection of a pipeline's last chunk."""
    gpt = unwrapped(model)
    layer = getattr(gpt, "output_layer", None)
    if layer is None:
        raise ConfigError(
            f"{type(gpt).__name__} has no output_layer; use Megatron's GPTModel or HybridModel"
        )
    if getattr(layer, "bias", None) is not None:
        raise ConfigError(
            "the output layer has a bias, which chunked log-probs do not add; build it without one"
        )
    return layer


def mark_head(chunk: Any, *, num_ids: int, logit_cap: float | None) -> None:
    """Note on a model chunk `VocabHead.num_ids`, the rows of its vocabulary that are no padding,
    and `VocabHead.logit_cap`."""
    vars(unwrapped(chunk)).update(num_ids=num_ids, logit_cap=logit_cap)


def marked(chunk: Any, name: str) -> Any:
    """What `mark_head` noted; None on other models."""
    return getattr(unwrapped(chunk), name, None)


class ValueHead(torch.nn.Module):
    """Linear layer from hidden size to 1, fp32, no bias; replicated on tensor-parallel ranks.

    It replaces the model's `output_layer`, so that DDP, optimizer and checkpoints include it.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32))
        mark_fp32(self.weight)
        # As Megatron marks its output layer: Muon leaves the weight to Adam.
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Values [..., 1], fp32; the signature is that of Megatron's output layer."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float()), None


def replace_output_layer(model: Any) -> None:
    """Replace the output layer of a GPT by a value head; call it for each chunk before DDP.

    Chunks without an output layer do not change. All chunks of all ranks must be built with untied
    embeddings.

    Args:
        model: a GPT chunk of this rank.

    Raises:
        ConfigError: the embedding is tied to the output layer.
    """
    gpt = unwrapped(model)
    if gpt.share_embeddings_and_output_weights:
        raise ConfigError(
            "a value head replaces the output layer, but the embedding is tied to it; set "
            "share_embeddings_and_output_weights=False (model.untie_embeddings=true)"
        )
    if gpt.post_process:
        gpt.output_layer = ValueHead(gpt.config.hidden_size)


def row_scores(row: PlacedRow, values_T: Tensor) -> Tensor:
    """Each sample's value at its last token, [n]; collective in the row's CP group."""
    values_E = values_T[row.end_positions_E]
    return sum_by_sample(values_E, row.end_samples_E, len(row.samples), row.cp_group)
