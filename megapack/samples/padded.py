"""Padded tensors [B, S] and the ragged values of their real tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megapack.errors import DataError


def padded_spans(attention_mask_BS: Tensor) -> list[tuple[int, int]]:
    """Columns [start, stop) of each sample's real tokens."""
    spans = []
    for b, mask in enumerate(attention_mask_BS != 0):
        columns = mask.nonzero().squeeze(1)
        if columns.numel() == 0:
            raise DataError(f"row {b} of the attention mask is empty; leave the row out")
        start, stop = int(columns[0]), int(columns[-1]) + 1
        if stop - start != columns.numel():
            raise DataError(
                f"row {b} of the attention mask has a hole between {start} and {stop}; give one "
                "unbroken run of real tokens"
            )
        spans.append((start, stop))
    return spans


def to_padded(values: Sequence[Tensor], attention_mask_BS: Tensor, fill: float = 0.0) -> Tensor:
    """Pad ragged per-token values to [B, S]; the inverse of `SampleBatch.from_padded`.

    >>> to_padded([torch.tensor([1.0, 2.0])], torch.tensor([[0, 1, 1]]))
    tensor([[0., 1., 2.]])
    """
    if len(values) != len(attention_mask_BS):
        raise DataError(
            f"{len(values)} samples for {len(attention_mask_BS)} rows of the mask; give one per row"
        )
    out_BS = values[0].new_full(tuple(attention_mask_BS.shape), fill)
    for b, (start, stop) in enumerate(padded_spans(attention_mask_BS)):
        if values[b].numel() != stop - start:
            raise DataError(
                f"row {b}: {values[b].numel()} values for {stop - start} tokens; give one per token"
            )
        out_BS[b, start:stop] = values[b]
    return out_BS


def ragged_values(
    name: str, value: Tensor, spans: list[tuple[int, int]], num_columns: int
) -> list[Tensor]:
    """The values of each sample's real tokens, from one tensor of all; see `from_padded`."""
    if (
        value.dim() == 0
        or value.shape[0] != len(spans)
        or value.dim() > 2
        or value.shape[-1] > max(num_columns, len(spans) if value.dim() == 1 else 0)
    ):
        raise DataError(
            f"field {name!r} has shape {tuple(value.shape)} for {len(spans)} samples of "
            f"{num_columns} columns; give [B, S], [B, R] for the last R columns, or [B]"
        )
    if value.dim() == 1:
        return list(value)
    offset = num_columns - value.shape[1]
    full = torch.nn.functional.pad(value, (offset, 0))
    return [full[b, start:stop] for b, (start, stop) in enumerate(spans)]
