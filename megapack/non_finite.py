"""A NaN or an infinity in a step is an error of every rank, told by those that had it.

Each forward leaves a flag on the device, and so do the gradients before their reduction. The device
is asked once, at the step's end; who and what is found out only where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.consensus import agree
from megapack.errors import ScheduleError
from megapack.microbatch_events import Kind

_MAX_SAMPLES = 8


class FiniteFlags:
    """Whether this rank's outputs, losses and gradients of one step are numbers."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[int, int], tuple[Tensor, bool]] = {}
        self._gradients: list[Tensor] = []

    def begins(self, kind: Kind, chunk: int, microbatch: int) -> None:
        """Nothing to look at yet."""

    def ends(self, kind: Kind, chunk: int, microbatch: int) -> None:
        """`puts_out` has looked."""

    def puts_out(self, chunk: int, microbatch: int, output: Tensor) -> None:
        """Look at hidden states, or a loss."""
        self._outputs[chunk, microbatch] = _is_finite(output.detach()), output.numel() == 1

    def look_at_gradients(self, buffers: Sequence[Tensor]) -> None:
        """Look at this rank's part of the gradients."""
        self._gradients = [_is_finite(buffer) for buffer in buffers]

    def refuse(self, row_samples: Sequence[tuple[int, ...]], *, device: torch.device) -> None:
        """Raise on every rank where one of them has something that is no number.

        A collective of all ranks.

        Args:
            row_samples: samples of each micro-batch of this rank.

        Raises:
            ScheduleError: naming the ranks, the micro-batches and their samples.
        """
        flags = [flag for flag, _ in self._outputs.values()] + self._gradients
        is_fine = torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)
        found = (~is_fine).to(device=device, dtype=torch.int32)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if found.item():
            agree(lambda: self._raise_own(row_samples), device=device)

    def _raise_own(self, row_samples: Sequence[tuple[int, ...]]) -> None:
        for (chunk, microbatch), (is_finite, is_loss) in self._outputs.items():
            if not is_finite:
                samples = row_samples[microbatch]
                few = ", ".join(map(str, samples[:_MAX_SAMPLES]))
                more = ", ..." if len(samples) > _MAX_SAMPLES else ""
                what = "loss" if is_loss else f"output of chunk {chunk}"
                raise ScheduleError(
                    f"the {what} of micro-batch {microbatch} (samples {few}{more}) holds a NaN or "
                    "an infinity; throw gradients of this step away, and look at these samples' "
                    "fields, the weights, and the learning rate"
                )
        if not all(map(bool, self._gradients)):
            raise ScheduleError(
                "the gradients hold a NaN or an infinity, though the losses do not; throw them "
                "away, and look at the model's precision and the learning rate"
            )


def _is_finite(values: Tensor) -> Tensor:
    # A sum is one read, and keeps a NaN or an infinity; in fp16 it could become one.
    return torch.isfinite(values.sum(dtype=torch.float32))
