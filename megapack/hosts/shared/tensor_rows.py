"""Select samples of a host's batch, in fields of tensors, ragged tensors or lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
            return take_ragged(value, indices)
        return value[torch.tensor(indices, dtype=torch.int64, device=value.device)]
    if getattr(value, "shape", ()):
        return value[list(indices)]
    # A 0-d array or an object that cannot be indexed is one value for the whole batch.
    if hasattr(value, "shape") or not hasattr(value, "__getitem__"):
        return value
    if isinstance(value, str | bytes | Mapping):
        return value
    return collect(type(value), [value[i] for i in indices])


def collect(kind: type, samples: Sequence[Any]) -> Any:
    """A field of a list type or of a packed type, from the values of its samples.

    A packed type holds the rows of all samples behind each other. It is not made from a list, but
    by `from_segments`, which SkyRL's `PackedTensor` has.
    """
    make: Callable[[list[Any]], Any] = getattr(kind, "from_segments", kind)
    return make(list(samples))


def take_ragged(value: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Select samples of a nested tensor in the jagged layout, and keep its ragged dimension."""
    import torch

    samples = value.unbind()
    ragged = getattr(value, "_ragged_idx", 1)
    # The nested tensor is built with the ragged dimension first, then transposed back.
    rows = [samples[i].transpose(0, ragged - 1) for i in indices]
    taken = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return taken.transpose(1, ragged) if ragged > 1 else taken
