"""Multi-token prediction (MTP) on packed rows: labels further ahead in the same sample.

Megatron's MTP block appends its hidden states to those of the model. At depth k (1, 2, ...) its
input is the token k positions ahead, and it predicts the token k positions after the label
(`PackedRow.ahead`). Head, weights and layout are those of the main loss. The loss of a depth is the
negative log-likelihood of the response with the main loss's weights, times mtp_loss_scaling_factor
/ mtp_num_layers (arXiv 2412.19437, eq. 24 and 25).
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from megapack.errors import ConfigError
from megapack.model.replaced import replaced
from megapack.model.settings import refuse_set
from megapack.rows.packed import PackedRow


def inputs_ahead(
    row: PackedRow, tokens_1T: Tensor, position_ids_1T: Tensor
) -> contextlib.AbstractContextManager[None]:
    """Within the block, Megatron's MTP layers take their inputs from `row.ahead`.

    Megatron shifts the inputs itself, sample by sample, and waits for the device twice per sample;
    with context parallelism it also exchanges the ends of each sample's parts.

    Args:
        tokens_1T, position_ids_1T: the tensors that the model gets.
    """
    if not row.ahead:
        # Megatron's dev branch does not have what is replaced.
        return contextlib.nullcontext()
    tokens = [tokens_1T, *(ahead.tokens_T[None] for ahead in row.ahead)]
    positions = [position_ids_1T, *(ahead.position_ids_T[None] for ahead in row.ahead)]
    pairs = itertools.chain(itertools.pairwise(tokens), itertools.pairwise(positions))
    following = {id(now): ahead for now, ahead in pairs}
    original = multi_token_prediction._roll_tensor_packed_seq

    def roll(tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        ahead = following.get(id(tensor))
        if ahead is None:
            return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        return ahead, ahead.sum()

    return replaced(multi_token_prediction, _roll_tensor_packed_seq=roll)


def num_depths(config: Any) -> int:
    """Number of MTP layers of a model; 0 without MTP."""
    return getattr(config, "mtp_num_layers", None) or 0


def loss_name(depth: int) -> str:
    """Name of a depth's loss in the metrics of a step."""
    return f"mtp_{depth}_loss"


def loss_names(config: Any) -> list[str]:
    """Names of the losses of all depths."""
    return [loss_name(depth) for depth in range(1, num_depths(config) + 1)]


def loss_coefs(config: Any) -> list[float]:
    """Factor of each depth's loss relative to the main loss."""
    depths = num_depths(config)
    return [config.mtp_loss_scaling_factor / depths for _ in range(depths)]


def check_mtp(config: Any) -> None:
    """Raise ConfigError if multi-token prediction would fail with this config."""
    if not num_depths(config):
        return
    if config.recompute_granularity == "full":
        raise ConfigError(
            f"config.mtp_num_layers={config.mtp_num_layers} with recompute_granularity='full': "
            "Megatron's MTP layers save packed_seq_params as if it were a tensor; set "
            "recompute_granularity='selective' or None, or mtp_num_layers=None"
        )
    unsupported = {
        "mtp_detach_heads": "the vocabulary projection would get gradients of the further losses; "
        "set it to False",
        "mtp_hsm": "it mixes hidden states at random over the positions of a row, so the gradient "
        "would depend on the packing; set it to False",
    }
    refuse_set(config, unsupported)
