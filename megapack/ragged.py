"""Tensors that are no per-token values: images, grids, audio; ragged, of any shape.

    batch = SampleBatch(tokens, fields, tensors={"pixels": TensorField(images)})

They follow their sample into its micro-batch, and the model's forward gets them by their name.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megapack.errors import ConfigError, DataError

Combine = Literal["concat", "list"]
RowTensor = Tensor | tuple[Tensor, ...]

_RESERVED = ("input_ids", "position_ids", "attention_mask", "packed_seq_params", "labels")


@dataclass(frozen=True)
class TensorField:
    """One tensor per sample, and what a micro-batch makes of them."""

    values: Sequence[Any]
    """Per sample a tensor or array. Under "concat" of shape [k, *rest] with any k, one `rest` for
    all samples, and None for a sample that has none."""
    combine: Combine = "concat"
    """"concat": along dimension 0, in row order; a padding micro-batch has [0, *rest]. "list": a
    tuple in row order, shapes as they are; a padding micro-batch has ()."""

    def __post_init__(self) -> None:
        if self.combine not in get_args(Combine):
            raise ConfigError(f"combine={self.combine!r}; set one of {get_args(Combine)}")


class RaggedTensor:
    """A `TensorField` that was checked.

    Raises:
        DataError: naming field, sample and shapes.
    """

    def __init__(self, name: str, field: TensorField, num_samples: int) -> None:
        if name in _RESERVED:
            raise DataError(f"tensor field {name!r} is an input of every model; set another name")
        if len(field.values) != num_samples:
            raise DataError(
                f"tensor field {name!r} has {len(field.values)} values for {num_samples} samples"
            )
        self.name, self.combine = name, field.combine
        given = [None if v is None else self._tensor(i, v) for i, v in enumerate(field.values)]
        known = [tensor for tensor in given if tensor is not None]
        if not known or (self.combine == "list" and len(known) < num_samples):
            raise DataError(
                f"tensor field {name!r}: {num_samples - len(known)} samples have None; give one "
                "tensor per sample, or under combine='concat' to one sample at least"
            )
        self.dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in known))
        self._empty = torch.zeros((0, *known[0].shape[1:]), dtype=self.dtype)
        self.values = [self._empty if t is None else t.to(self.dtype) for t in given]
        if self.combine == "concat":
            self._check_rest()

    def row(self, samples: Sequence[int]) -> RowTensor:
        """What the micro-batch of these samples carries."""
        chosen = [self.values[i] for i in samples]
        return torch.cat([self._empty, *chosen]) if self.combine == "concat" else tuple(chosen)

    @property
    def signature(self) -> str:
        """Name, combination, dtype and a digest of all shapes: what ranks must agree on."""
        shapes = str([tuple(value.shape) for value in self.values])
        digest = hashlib.sha256(shapes.encode()).hexdigest()
        return f"{self.name} {self.combine} {self.dtype} {digest}"

    def _tensor(self, sample: int, value: Any) -> Tensor:
        try:
            tensor = torch.as_tensor(value).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"sample {sample}: tensor field {self.name!r} cannot be a tensor ({error}); give "
                "numbers"
            ) from None
        if self.combine == "concat" and tensor.dim() == 0:
            raise DataError(
                f"sample {sample}: tensor field {self.name!r} is one number, which does not "
                "concatenate; give shape [k, ...], or set combine='list'"
            )
        return tensor.float() if tensor.dtype == torch.float64 else tensor

    def _check_rest(self) -> None:
        rest = self._empty.shape[1:]
        for i, value in enumerate(self.values):
            if value.shape[1:] != rest:
                raise DataError(
                    f"sample {i}: tensor field {self.name!r} has shape {tuple(value.shape)}, not "
                    f"[k, {', '.join(map(str, rest))}] as those before it; set combine='list' for "
                    "shapes that differ"
                )
