"""A NaN or an infinity in a step is an error of every rank, told by those that had it.

Each forward leaves a flag on the device, and so do the gradients before their reduction. The device
is asked once, at the step's end; who and what is found out only where there is one. A stage passes
what is no number on to the next; only the first one is to blame.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.consensus import agree
from megapack.errors import ScheduleError
from megapack.microbatch_events import Listener

_MAX_SAMPLES = 8


class Spot(NamedTuple):
    """Where something was no number."""

    replica: int
    """The data-parallel rank."""
    microbatch: int | None
    """None for gradients, which are of all of them."""
    order: int
    """Of one replica's spots, the least came first."""


class FiniteFlags(Listener):
    """Whether this rank's outputs, losses and gradients of one step are numbers.

    Args:
        stages: of each of its chunks, which stage of the whole model it is.
        replica: the data-parallel rank.
    """

    def __init__(self, stages: Sequence[int] = (0,), replica: int = 0) -> None:
        self._stages, self._replica = stages, replica
        self._outputs: dict[tuple[int, int], tuple[Tensor, bool]] = {}
        self._gradients: list[tuple[int, Tensor]] = []

    def puts_out(self, chunk: int, microbatch: int, output: Tensor) -> None:
        """Look at hidden states, or a loss."""
        self._outputs[chunk, microbatch] = _is_finite(output.detach()), output.numel() == 1

    def look_at_gradients(self, chunks: Sequence[Sequence[Tensor]]) -> None:
        """Look at this rank's part of the gradients, the buffers of each chunk."""
        self._gradients = [
            (chunk, _is_finite(buffer)) for chunk, own in enumerate(chunks) for buffer in own
        ]

    def refuse(self, row_samples: Sequence[tuple[int, ...]], *, device: torch.device) -> None:
        """Raise on every rank where one of them has something that is no number.

        A collective of all ranks.

        Args:
            row_samples: samples of each micro-batch of this rank.

        Raises:
            ScheduleError: naming the ranks that came first, the micro-batches and their samples.
        """
        flags = [flag for flag, _ in self._outputs.values()]
        flags += [flag for _, flag in self._gradients]
        is_fine = torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)
        found = (~is_fine).to(device=device, dtype=torch.int32)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if found.item():
            seen: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(seen, list(self._spots()))
            first = origins(itertools.chain.from_iterable(seen))
            agree(lambda: self._raise_own(first, row_samples), device=device)

    def _spots(self) -> Iterator[Spot]:
        for (chunk, microbatch), (is_finite, _) in self._outputs.items():
            if not is_finite:
                yield self._output_spot(chunk, microbatch)
        for chunk, is_finite in self._gradients:
            if not is_finite:
                yield self._gradient_spot(chunk)

    def _output_spot(self, chunk: int, microbatch: int) -> Spot:
        return Spot(self._replica, microbatch, self._stages[chunk])

    def _gradient_spot(self, chunk: int) -> Spot:
        return Spot(self._replica, None, -self._stages[chunk])

    def _raise_own(self, first: set[Spot], row_samples: Sequence[tuple[int, ...]]) -> None:
        # Ranks of one stage share its spots: tensor and context parallel ones.
        for (chunk, microbatch), (is_finite, is_loss) in self._outputs.items():
            if not is_finite and self._output_spot(chunk, microbatch) in first:
                samples = row_samples[microbatch]
                few = ", ".join(map(str, samples[:_MAX_SAMPLES]))
                more = ", ..." if len(samples) > _MAX_SAMPLES else ""
                what = "loss" if is_loss else f"output of chunk {chunk}"
                raise ScheduleError(
                    f"the {what} of micro-batch {microbatch} (samples {few}{more}) holds a NaN or "
                    "an infinity; throw gradients of this step away, and look at these samples' "
                    "fields, the weights, and the learning rate"
                )
        if any(not fine and self._gradient_spot(chunk) in first for chunk, fine in self._gradients):
            raise ScheduleError(
                "the gradients hold a NaN or an infinity, though the losses do not; throw them "
                "away, and look at the model's precision and the learning rate"
            )


def origins(seen: Iterable[Spot]) -> set[Spot]:
    """What came first in each micro-batch; gradients only where every output is a number."""
    spots = list(seen)
    first: dict[tuple[int, int | None], Spot] = {}
    for spot in [spot for spot in spots if spot.microbatch is not None] or spots:
        key = spot.replica, spot.microbatch
        first[key] = min(first.get(key, spot), spot, key=lambda spot: spot.order)
    return set(first.values())


def _is_finite(values: Tensor) -> Tensor:
    # A sum is one read, and keeps a NaN or an infinity; in fp16 it could become one.
    return torch.isfinite(values.sum(dtype=torch.float32))
