"""Select samples of a host's batch, in fields of tensors, ragged tensors or lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def take(value: Any, indices: Sequence[int]) -> Any:
    """Select samples of one field, in the order of `indices`.

    A field without a batch dimension (None, a number, a string) is returned as it is. Fields of
    other types than tensors keep their type; they only need int indexing.
    """
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return _ragged_rows(value, [indices])[0]
        return value[torch.tensor(indices, dtype=torch.int64, device=value.device)]
    if getattr(value, "shape", ()):
        return value[list(indices)]
    # A 0-d array or an object that cannot be indexed is one value for the whole batch.
    if hasattr(value, "shape") or not hasattr(value, "__getitem__"):
        return value
    if isinstance(value, str | bytes | Mapping):
        return value
    kind: Callable[[list[Any]], Any] = type(value)
    return kind([value[i] for i in indices])


def take_rows(value: Any, rows: Sequence[Sequence[int]]) -> list[Any]:
    """Select the samples of each row of one field; see `take`."""
    import torch

    if isinstance(value, torch.Tensor) and value.is_nested:
        return _ragged_rows(value, rows)
    return [take(value, row) for row in rows]


def _ragged_rows(value: Any, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Rows of a nested tensor in the jagged layout; they keep its ragged dimension.

    The samples of a row are joined at once: a tensor per sample would cost more than the copy.
    """
    import torch

    values, offsets, lengths = value.values(), value.offsets(), value.lengths()
    starts = offsets.tolist()
    sizes = np.diff(starts).tolist() if lengths is None else lengths.tolist()
    # The values have no dimension for the samples.
    ragged = value._ragged_idx - 1
    taken = []
    for row in rows:
        own = [sizes[i] for i in row]
        taken.append(
            torch.nested.nested_tensor_from_jagged(
                torch.cat([values.narrow(ragged, starts[i], sizes[i]) for i in row], ragged),
                torch.tensor([0, *accumulate(own)], dtype=offsets.dtype, device=offsets.device),
                jagged_dim=ragged + 1,
                min_seqlen=min(own),
                max_seqlen=max(own),
            )
        )
    return taken
