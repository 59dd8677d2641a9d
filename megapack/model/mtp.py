"""Multi-token prediction on packed rows: what the tokens further ahead are, inside each sample.

Megatron's MTP block already rolls its inputs inside samples and hands its hidden states on behind
those of the model. What they predict at depth k (1, 2, ...) is the token k places after the label,
and that is again a packed row: the same positions with other labels. So the head, the weights and
the layout are those of the main loss; a depth's loss is the negative log-likelihood of the response
with the main loss's weights, times mtp_loss_scaling_factor / mtp_num_layers (arXiv 2412.19437,
eq. 24 and 25).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megapack.errors import ConfigError
from megapack.rows.packed import PackedRow


def with_rows_ahead(row: PackedRow, num_depths: int) -> PackedRow:
    """The row, carrying the rows of the first depths."""
    ahead = tuple(row_ahead(row, depth) for depth in range(1, num_depths + 1))
    return replace(row, ahead=ahead)


def row_ahead(row: PackedRow, depth: int) -> PackedRow:
    """The row whose labels stand `depth` tokens further ahead; a sample's end has none.

    With samples [5, 6, 7] and [8, 9]:

        tokens_T           5 6 7 8 9
        labels_T           6 7 0 9 0
        at depth 1         7 0 0 0 0
    """
    labels_T, weights_T = _ahead(row, row.labels_T, depth), _ahead(row, row.weights_T, depth)
    return replace(
        row,
        labels_T=labels_T,
        weights_T=weights_T,
        loss_positions_R=weights_T.nonzero().squeeze(1),
        fields={},
        sample_fields={},
        tensors={},
    )


def _ahead(row: PackedRow, values_T: Tensor, depth: int) -> Tensor:
    out_T = torch.zeros_like(values_T)
    for start, length in zip(row.starts, row.lengths, strict=True):
        end = start + length
        out_T[start : max(start, end - depth)] = values_T[start + depth : max(end, start + depth)]
    return out_T


def num_depths(config: Any) -> int:
    """MTP layers of a model, 0 for none."""
    return getattr(config, "mtp_num_layers", None) or 0


def loss_name(depth: int) -> str:
    """What a step calls the loss of a depth in its metrics."""
    return f"mtp_{depth}_loss"


def loss_names(config: Any) -> list[str]:
    """The names of all depths' losses."""
    return [loss_name(depth) for depth in range(1, num_depths(config) + 1)]


def loss_coefs(config: Any) -> list[float]:
    """What the loss of each depth counts beside the main loss."""
    depths = num_depths(config)
    return [config.mtp_loss_scaling_factor / depths for _ in range(depths)]


def check_mtp(config: Any) -> None:
    """Raise ConfigError if multi-token prediction would fail or be wrong."""
    if not num_depths(config):
        return
    if config.recompute_granularity == "full":
        raise ConfigError(
            f"config.mtp_num_layers={config.mtp_num_layers} with recompute_granularity='full': "
            "Megatron's MTP layers save packed_seq_params as if it were a tensor; set "
            "recompute_granularity='selective' or None, or mtp_num_layers=None"
        )
