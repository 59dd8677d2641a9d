"""Rows of a SkyRL batch: a dict of tensors [B, ...] and TensorLists, of its own type."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

from megapack.hosts.rank_rows import Rows
from megapack.hosts.tensor_rows import take

if TYPE_CHECKING:
    import torch


def real_tokens(data: Any) -> list[int]:
    """Tokens of each sample that are not padding."""
    counts: list[int] = data["attention_mask"].sum(dim=1).tolist()
    return counts


def select(data: Any, row: list[int]) -> Any:
    """The samples of a row, with the batch's metadata."""
    batch = type(data)({name: take(value, row) for name, value in data.items()})
    batch.metadata = data.metadata
    return batch


def padding_rows(data: Any, num: int, *, like: Any = None) -> Any:
    """Samples without a loss, as wide as those of `data`: one token each that attention sees.

    Args:
        like: the batch that they are appended to: its means over responses leave them out, and
            fields of tensors of unequal shapes repeat its first one. None: they are a batch of
            their own, in which no mean divides by zero, without such fields.
    """
    import torch

    fields: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            rows = value.new_zeros((num, *value.shape[1:]))
            alone = like is None or name != "response_mask"
            fields[name] = _FILL[name](rows) if alone and name in _FILL else rows
        elif value is None:
            fields[name] = None
        elif like is not None:
            fields[name] = type(value)([like[name][0]] * num)
    batch = type(data)(fields)
    batch.metadata = {**(data.metadata or {}), "is_padding_batch": True}
    return batch


def stack(first: Any, second: Any) -> Any:
    """The samples of both, with the fields and the metadata of the first."""
    batch = type(first)({name: _joined([value, second[name]]) for name, value in first.items()})
    batch.metadata = first.metadata
    return batch


def combine(batches: list[Any], rows: Rows) -> Any:
    """Outputs of micro-batches in the order of the samples.

    Args:
        batches: per micro-batch a batch whose first samples are those of its row.
        rows: per micro-batch its samples, each of them in one.
    """
    sample_of = list(chain.from_iterable(rows))
    order = sorted(range(len(sample_of)), key=sample_of.__getitem__)
    fields = {}
    for name in batches[0].keys():  # noqa: SIM118 - batches are sequences of samples, too
        real = [_first(batch[name], len(row)) for batch, row in zip(batches, rows, strict=True)]
        fields[name] = take(_joined(real), order)
    combined = type(batches[0])(fields)
    combined.metadata = batches[0].metadata
    return combined


def _first(value: Any, num: int) -> Any:
    return None if value is None else value[:num]


def _joined(values: list[Any]) -> Any:
    import torch

    if values[0] is None:
        return None
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values)
    return type(values[0])([value[i] for value in values for i in range(len(value))])


def _ones(rows: torch.Tensor) -> torch.Tensor:
    return rows.fill_(1)


def _first_token(rows: torch.Tensor) -> torch.Tensor:
    """One token: attention without any divides by zero."""
    rows[:, 0] = 1
    return rows


def _distinct_experts(rows: torch.Tensor) -> torch.Tensor:
    """Experts 0, 1, ... of each token: a router takes no expert twice."""
    import torch

    return rows + torch.arange(rows.shape[-1], dtype=rows.dtype, device=rows.device)


_FILL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention_mask": _first_token,
    "response_mask": _ones,
    "router_padding_mask": _ones,
    "rollout_expert_indices": _distinct_experts,
}
