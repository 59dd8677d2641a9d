"""A linear head that gives one number per token, in place of the vocabulary projection.

The position that predicts token t + 1 has seen the tokens up to t: its value is that of the state
in which token t + 1 is chosen, so values stand where log-probs stand. A sample's score is the value
at its last token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megapack.errors import ConfigError
from megapack.head import unwrapped
from megapack.segments import sum_by_sample
from megapack.thd import PackedRow


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
    """Give a GPT model a value head; on chunks before the last one there is nothing to do.

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
