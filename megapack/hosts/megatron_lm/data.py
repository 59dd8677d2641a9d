"""Read items of Megatron-LM's data sets into a step's `SampleBatch`, the same on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megapack.errors import DataError, of_all_ranks
from megapack.samples import RESPONSE_MASK, SampleBatch

Sample = dict[str, np.ndarray[Any, Any]]


def draw_batch(data_iterator: Any, num_items: int, field_names: Sequence[str]) -> SampleBatch:
    """Draw a step's samples on the ranks that have data, and send them to all ranks.

    A collective of all ranks. Samples are in the order of data-parallel ranks. Each rank gets all
    of them, 5 bytes per token.

    Args:
        data_iterator: Megatron-LM's, or a list of them, one per model chunk; read on the first
            pipeline stage's first tensor-parallel rank.
        num_items: number of items that each data-parallel rank draws.
        field_names: keys of per-token values other than the loss mask.

    Raises:
        DataError: on every rank, if one of them could not draw.
    """
    model_group = parallel_state.get_model_parallel_group()
    source = dist.get_global_rank(model_group, 0)
    parts: list[Any] = [None]
    if dist.get_rank() == source:
        data_group = parallel_state.get_data_parallel_group()
        own = _draw(data_iterator, num_items, field_names)
        parts = [[own] * data_group.size()]
        if data_group.size() > 1:
            dist.all_gather_object(parts[0], own, group=data_group)
    dist.broadcast_object_list(parts, src=source, group=model_group)
    errors = [
        f"data-parallel rank {rank}: {part}"
        for rank, part in enumerate(parts[0])
        if isinstance(part, str)
    ]
    if errors:
        raise of_all_ranks(DataError("; ".join(errors)))
    samples = [sample for part in parts[0] for sample in part]
    return SampleBatch(
        [sample["tokens"] for sample in samples],
        {name: [s[name] for s in samples] for name in (RESPONSE_MASK, *field_names)},
    )


def _draw(data_iterator: Any, num_items: int, field_names: Sequence[str]) -> list[Sample] | str:
    """This rank's samples, or an error message: the error must reach every rank."""
    if isinstance(data_iterator, list):
        data_iterator = data_iterator[0]
    samples: list[Sample] = []
    try:
        for _ in range(num_items):
            samples += read_item(next(data_iterator), field_names)
    except StopIteration:
        return f"the data ended within a step of {num_items} items"
    except Exception as error:  # a data set may raise anything
        return f"{type(error).__name__}: {error}"
    return samples


def read_item(item: Mapping[str, Any], field_names: Sequence[str] = ()) -> list[Sample]:
    """The samples of one item: a row is a sample, or is cut into its samples where it has several.

    A sample starts where `cu_seqlens` says so, or where position_ids start again from 0
    (`--reset-position-ids`). It ends behind its last token with a loss.

    Args:
        item: `tokens`, `labels` (the next token of each), `loss_mask` and fields, [B, S] or [S];
            `cu_seqlens` (or `cu_seqlens_padded`) if rows are packed; `attention_mask` [B, 1, S, S],
            true where a token does not see another, is compared with the position_ids.

    Raises:
        DataError: a key is missing, or the item needs other training than causal attention over
            whole samples and next-token losses with weights 0 and 1.
    """
    names = ("tokens", "labels", "loss_mask", *field_names)
    missing = [name for name in names if item.get(name) is None]
    if missing:
        raise DataError(f"an item has no {', '.join(missing)}; its keys are {', '.join(item)}")
    rows = {name: np.atleast_2d(torch.as_tensor(item[name]).cpu().numpy()) for name in names}
    if item.get("position_ids") is not None:
        rows["position_ids"] = np.atleast_2d(torch.as_tensor(item["position_ids"]).cpu().numpy())
    all_bounds = _bounds(item, rows)
    return [
        _sample({name: values[b, start:stop] for name, values in rows.items()}, field_names)
        for b, bounds in enumerate(all_bounds)
        for start, stop in itertools.pairwise(bounds)
    ]


def _bounds(item: Mapping[str, Any], rows: Sample) -> list[list[int]]:
    """Where the samples of each row start, and where the last one ends."""
    loss_mask = rows["loss_mask"]
    for name in ("cu_seqlens_padded", "cu_seqlens"):
        if item.get(name) is None:
            continue
        # Megatron-LM fills it up to a fixed size with its last value.
        bounds = sorted({int(bound) for bound in torch.as_tensor(item[name]).flatten().tolist()})
        if len(loss_mask) > 1 or bounds[0] != 0 or loss_mask[:, bounds[-1] :].any():
            raise DataError(
                f"{name} leaves loss tokens out: it runs from {bounds[0]} to {bounds[-1]} in "
                f"{len(loss_mask)} row(s) of {loss_mask.shape[1]}; set --micro-batch-size 1"
            )
        return [bounds]
    num_rows, num_tokens = loss_mask.shape
    if "position_ids" not in rows:
        starts = [[0]] * num_rows
    else:
        # Positions [0, 1, 2, 0, 1] start at [0, 3]. The first token starts a sample.
        starts = [[0, *(np.flatnonzero(p[1:] == 0) + 1).tolist()] for p in rows["position_ids"]]
        _check_attention_mask(item.get("attention_mask"), starts)
    return [[*row_starts, num_tokens] for row_starts in starts]


def _check_attention_mask(attention_mask: Any, starts: list[list[int]]) -> None:
    """Raise DataError unless documents that restart their positions are those that are masked."""
    if attention_mask is None:
        return
    mask = torch.as_tensor(attention_mask)
    # One mask for all rows, or one per row; a token that does not see the one before starts a
    # document.
    hidden = mask.reshape(-1, *mask.shape[-2:]).diagonal(-1, dim1=1, dim2=2)
    hidden = hidden.expand(len(starts), -1)
    for row, row_starts in enumerate(starts):
        masked = [int(i) for i in (hidden[row].nonzero()[:, 0] + 1).tolist()]
        if masked != row_starts[1:]:
            raise DataError(
                f"in row {row} positions start again at {row_starts[1:][:4]}, the attention mask "
                f"separates documents at {masked[:4]}; set --reset-position-ids and "
                "--reset-attention-mask together, or neither"
            )


def _sample(row: Sample, field_names: Sequence[str]) -> Sample:
    has_loss = row["loss_mask"] != 0
    if (row["loss_mask"][has_loss] != 1).any():
        raise DataError("loss_mask holds other values than 0 and 1; use an objective's field")
    # Attention is causal: tokens behind the last loss change no loss.
    n = int(np.flatnonzero(has_loss)[-1]) + 1 if has_loss.any() else 1
    tokens = row["tokens"][:n]
    labels = row["labels"][:n]
    has_loss = has_loss[:n]
    if (labels[:-1] != tokens[1:])[has_loss[:-1]].any():
        raise DataError("labels are not the next tokens; megapack predicts a row's own next token")
    positions = row.get("position_ids")
    if positions is not None and (positions[:n] != np.arange(n)).any():
        raise DataError(
            f"position_ids of a sample of {n} tokens are not 0 to {n - 1} but end with "
            f"{positions[n - 1]}; megapack numbers a sample's tokens from 0"
        )
    # A label without a loss may be any number, such as -100.
    last = labels[-1] if has_loss[-1] else tokens[-1]
    # Values of a label stand at the label's own position, one further than in the item.
    return {
        "tokens": np.append(tokens, last).astype(np.int32),
        RESPONSE_MASK: np.append(False, has_loss),
        **{name: np.append(0.0, row[name][:n]).astype(np.float32) for name in field_names},
    }
