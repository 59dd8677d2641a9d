"""Tensors of samples that have not one value per token: images, grids, audio."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megapack.errors import ConfigError, DataError, first_line

Combine = Literal["concat", "list"]
RowTensor = Tensor | tuple[Tensor, ...]

# Inputs that every model gets; tensor fields must have other names.
_RESERVED = ("input_ids", "position_ids", "attention_mask", "packed_seq_params", "labels")


@dataclass(frozen=True)
class TensorField:
    """One tensor per sample, and how a micro-batch combines them."""

    values: Sequence[Any]
    """Per sample a tensor or array. With "concat" its shape is [k, *rest]: any k, the same `rest`
    for all samples; None means k = 0."""
    combine: Combine = "concat"
    """"concat": one tensor, joined along dimension 0 in row order; [0, *rest] in a padding
    micro-batch. "list": a tuple in row order, with shapes unchanged; () in a padding
    micro-batch."""
    of_prefix: bool = False
    """The tensors belong to tokens that samples have in common, such as the images of a prompt.
    Samples of a row that share a beginning must have equal tensors, and the row gets them once. If
    this is not set, such samples must not have any. A row repeats the last common token for each
    sample (with context parallelism the last 2 * cp or fewer), so the tensors' tokens must come
    before that."""

    def __post_init__(self) -> None:
        if self.combine not in get_args(Combine):
            raise ConfigError(f"combine={self.combine!r}; set one of {get_args(Combine)}")


class RaggedTensor:
    """A checked `TensorField`.

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
        self.name = name
        self.combine = field.combine
        self.of_prefix = field.of_prefix
        given = [None if v is None else self._tensor(i, v) for i, v in enumerate(field.values)]
        known = [tensor for tensor in given if tensor is not None]
        if not known or (self.combine == "list" and len(known) < num_samples):
            raise DataError(
                f"tensor field {name!r}: {num_samples - len(known)} samples have None; give one "
                "tensor per sample, or with combine='concat' to at least one sample"
            )
        self.dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in known))
        self._empty = torch.zeros((0, *known[0].shape[1:]), dtype=self.dtype)
        self.values = [self._empty if t is None else t.to(self.dtype) for t in given]
        if self.combine == "concat":
            self._check_rest()

    def row(self, samples: Sequence[int], trees: Sequence[Sequence[int]]) -> RowTensor:
        """The combined tensor of the micro-batch with these samples; see `row_tensors`."""
        repeated: set[int] = set()
        for first, *others in trees:
            for other in others:
                self._check_shared(samples[first], samples[other])
            repeated.update(others)
        chosen = [self.values[i] for k, i in enumerate(samples) if k not in repeated]
        return torch.cat([self._empty, *chosen]) if self.combine == "concat" else tuple(chosen)

    def _check_shared(self, first: int, other: int) -> None:
        pair = (self.values[first], self.values[other])
        if self.of_prefix and not torch.equal(*pair):
            raise DataError(
                f"samples {first} and {other} share their first tokens, and their tensors in field "
                f"{self.name!r} differ; give equal tensors, or plan without prefixes"
            )
        if not self.of_prefix and any(value.numel() for value in pair):
            raise DataError(
                f"samples {first} and {other} share their first tokens and have tensors in field "
                f"{self.name!r}; set TensorField(of_prefix=True) if these belong to the shared "
                "tokens, or plan without prefixes"
            )

    @property
    def signature(self) -> str:
        """Name, combination, dtype and a digest of all shapes; must be equal on all ranks."""
        shapes = str([tuple(value.shape) for value in self.values])
        digest = hashlib.sha256(shapes.encode()).hexdigest()
        of = " of prefixes" if self.of_prefix else ""
        return f"{self.name} {self.combine}{of} {self.dtype} {digest}"

    def _tensor(self, sample: int, value: Any) -> Tensor:
        tensor = as_tensor(f"sample {sample}: tensor field {self.name!r}", value)
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
                    f"[k, {', '.join(map(str, rest))}] like the samples before it; set "
                    "combine='list' for different shapes"
                )


def as_tensor(what: str, value: Any) -> Tensor:
    """A value as a tensor on the CPU; raises DataError that begins with `what`."""
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} cannot be a tensor ({first_line(error)}); give numbers") from None
