"""How a step handles faults: running out of memory, and values that are not finite.

A rank that runs out of memory leaves the schedule with an error that says which rows it had; the
others wait for it inside theirs, until `ranks.links` gives them its error.

A NaN or an infinity on one rank is an error of every rank. Each forward sets a flag on the device,
and so do the gradients before their reduction (after it, if it overlaps with backwards: then the
error names every rank of the sum). The flags are read once, at the step's end; only if
one is set do the ranks find out which rank set it. A stage passes a NaN on to the next stage, so
only the first one is reported.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.errors import ScheduleError
from megapack.model.overlap import overlaps_reduction
from megapack.ranks.agree import agree
from megapack.ranks.place import Place
from megapack.rows.packed import PackedRow
from megapack.schedule import checks
from megapack.schedule.listeners import Listener
from megapack.schedule.token_losses import TokenLosses

logger = logging.getLogger(__name__)

# Limit on the samples of a micro-batch that an error names.
_MAX_SAMPLES = 8


class StepOutOfMemory(ScheduleError, torch.OutOfMemoryError):
    """A GPU ran out of memory in a step. Handlers of torch's error catch it too."""

    exit_code = 1

    @classmethod
    def of(
        cls, error: torch.OutOfMemoryError, rows: Sequence[PackedRow], place: Place
    ) -> StepOutOfMemory:
        """Torch's error, with the rows of this rank and what to set.

        Args:
            place: where memory ran out.
        """
        # What was asked for, and what the GPU has; the rest is about torch's settings.
        reason = ". ".join(str(error).partition("\n")[0].split(". ")[:3]).rstrip(".")
        sizes = [row.tokens_T.numel() for row in rows]
        text = f"the step's rows have up to {max(sizes)} tokens on this GPU"
        if (k := place.microbatch) is not None:
            text += f", micro-batch {k} ({samples_text(rows[k].samples)}) has {sizes[k]}"
        return cls(
            f"{reason or 'out of memory'}; {text}; set a lower max_tokens_per_gpu or "
            "micro_batch_size, model.recompute=full, or a layout with more stages"
        )


class Spot(NamedTuple):
    """Where a value was not finite."""

    replica: int
    """The data-parallel rank; the first of those that share the micro-batch."""
    microbatch: int | None
    """None for gradients, which are sums over all micro-batches."""
    order: int
    """The spot with the lowest order came first in its replica."""


class FiniteFlags(Listener):
    """Whether this rank's outputs, losses and gradients of one step are finite.

    Args:
        stages: for each of its chunks, the index of its stage in the whole model.
        replica: the data-parallel rank.
        first_ranks: for each micro-batch the first of the DP ranks that share it. A NaN spreads
            among them in the attention of the next chunk, or of the same one.
        reads_gradients: not under fp16, where the loss scaler handles an overflow.
    """

    def __init__(
        self,
        stages: Sequence[int] = (0,),
        replica: int = 0,
        first_ranks: Sequence[int] = (),
        *,
        reads_gradients: bool = True,
    ) -> None:
        self._stages = stages
        self._reads_gradients = reads_gradients
        self._replica = replica
        self._first_ranks = first_ranks
        self._outputs: dict[tuple[int, int], tuple[Tensor, bool]] = {}
        self._gradients: list[tuple[int, Tensor]] = []
        self._noted: TokenLosses | None = None
        self._losses: dict[int, TokenLosses] = {}

    @classmethod
    def of_rank(
        cls,
        num_chunks: int,
        pp_group: Any,
        replica: int,
        first_ranks: Sequence[int] = (),
        *,
        reads_gradients: bool,
    ) -> FiniteFlags:
        """The flags of a pipeline rank with `num_chunks` chunks."""
        # Megatron assigns the model's stages to the pipeline ranks in turn: with pp=2 and vpp=2,
        # rank 1 has stages 1 and 3.
        stages = [chunk * pp_group.size() + pp_group.rank() for chunk in range(num_chunks)]
        return cls(stages, replica, first_ranks, reads_gradients=reads_gradients)

    def note_losses(self, losses: TokenLosses) -> None:
        """Keep the losses of tokens whose sum is the next output."""
        self._noted = losses

    def on_output(self, chunk: int, microbatch: int, output: Tensor) -> None:
        """Set the flag of hidden states or of a loss."""
        if self._noted is not None:
            self._losses[microbatch] = self._noted
            self._noted = None
        self._outputs[chunk, microbatch] = _is_finite(output.detach()), output.numel() == 1

    def check_gradients(self, chunks: Sequence[Sequence[Tensor]]) -> None:
        """Set the flags of this rank's gradients.

        Args:
            chunks: the gradient buffers of each chunk.
        """
        if self._reads_gradients:
            self._gradients = [
                (chunk, _is_finite(buffer)) for chunk, own in enumerate(chunks) for buffer in own
            ]

    def refuse(self, describe: Callable[[int], str], *, device: torch.device) -> None:
        """Raise on all ranks if any rank has a NaN or an infinity. A collective of all ranks.

        Args:
            describe: what is in a micro-batch of this rank, such as "samples 3, 5".

        Raises:
            ScheduleError: names the ranks where the values appeared first, and the micro-batches
                with their samples.
        """
        first = self._origins_on_all(device)

        def raise_own() -> None:
            for message in self._own_errors(first, describe):
                raise ScheduleError(message)

        if first:
            agree(raise_own, device=device)

    def warn(self, describe: Callable[[int], str], *, device: torch.device) -> None:
        """Log a warning on the ranks where a NaN or an infinity appeared first. A collective."""
        for message in self._own_errors(self._origins_on_all(device), describe):
            logger.warning("%s", message)

    def _origins_on_all(self, device: torch.device) -> set[Spot]:
        """The first spots of all ranks; empty if every value is finite."""
        flags = [flag for flag, _ in self._outputs.values()]
        flags += [flag for _, flag in self._gradients]
        is_fine = torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)
        is_bad = (~is_fine).to(device=device, dtype=torch.int32)
        dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
        if not is_bad.item():
            return set()
        spots: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(spots, list(self._spots()))
        return origins(itertools.chain.from_iterable(spots))

    def _spots(self) -> Iterator[Spot]:
        for (chunk, microbatch), (is_finite, _) in self._outputs.items():
            if not is_finite:
                yield self._output_spot(chunk, microbatch)
        for chunk, is_finite in self._gradients:
            if not is_finite:
                yield self._gradient_spot(chunk)

    def _output_spot(self, chunk: int, microbatch: int) -> Spot:
        first = self._first_ranks[microbatch] if self._first_ranks else self._replica
        return Spot(first, microbatch, self._stages[chunk])

    def _gradient_spot(self, chunk: int) -> Spot:
        return Spot(self._replica, None, -self._stages[chunk])

    def _own_errors(self, first: set[Spot], describe: Callable[[int], str]) -> Iterator[str]:
        # Tensor and context-parallel ranks of one stage have the same spots, and so have DP ranks
        # that share a micro-batch. The host waits for each flag that it reads, so it reads few.
        for (chunk, microbatch), (is_finite, is_loss) in self._outputs.items():
            if self._output_spot(chunk, microbatch) in first and not is_finite:
                what = "loss" if is_loss else f"output of chunk {chunk}"
                losses = self._losses.get(microbatch) if is_loss else None
                token = "" if losses is None else f": {losses.worst()}"
                yield (
                    f"the {what} of micro-batch {microbatch} ({describe(microbatch)}) holds a NaN "
                    f"or an infinity{token}; discard the gradients of this step, and check these "
                    "samples' fields, the weights, and the learning rate"
                )
        if any(self._gradient_spot(chunk) in first and not fine for chunk, fine in self._gradients):
            worst = max(self._losses.values(), key=lambda one: one.largest, default=None)
            token = "" if worst is None else f" (the largest: {worst.worst()})"
            yield (
                f"the gradients hold a NaN or an infinity, though the losses do not{token}; "
                "discard them, and check the model's precision and the learning rate"
            )


def check_loss(loss: float) -> None:
    """Raise ScheduleError if the sum of finite losses is not finite."""
    if not math.isfinite(loss):
        raise ScheduleError(
            f"the step's loss is {loss}, though every micro-batch's is finite; discard the "
            "gradients, and check the weights of the samples"
        )


def checking_finalize(
    finalize: Callable[..., None], flags: FiniteFlags, chunks: Sequence[Any], place: Place
) -> Callable[..., None]:
    """A `finalize_model_grads_func` that first checks this rank's own gradients.

    Reductions that overlap with backwards are running by then, so reduced gradients are checked.
    """
    are_running = any(map(overlaps_reduction, chunks))

    def check_buffers() -> None:
        buffers = [checks.gradient_buffers(chunk) for chunk in chunks]
        flags.check_gradients([[buffer.grad_data for buffer in own] for own in buffers])

    @functools.wraps(finalize)
    def finalize_model_grads(*args: Any, **kwargs: Any) -> None:
        place.enter("reduction")
        if not are_running:
            check_buffers()
        finalize(*args, **kwargs)
        if are_running:
            check_buffers()

    return finalize_model_grads


def samples_text(samples: Sequence[int]) -> str:
    """A micro-batch's samples, for an error.

    >>> samples_text((3, 5))
    'samples 3, 5'
    """
    few = ", ".join(map(str, samples[:_MAX_SAMPLES]))
    return f"samples {few}{', ...' if len(samples) > _MAX_SAMPLES else ''}"


def origins(spots: Iterable[Spot]) -> set[Spot]:
    """The first spot of each micro-batch; spots in gradients only if every output is finite."""
    every = list(spots)
    first: dict[tuple[int, int | None], Spot] = {}
    for spot in [spot for spot in every if spot.microbatch is not None] or every:
        key = spot.replica, spot.microbatch
        first[key] = min(first.get(key, spot), spot, key=lambda spot: spot.order)
    return set(first.values())


def _is_finite(values: Tensor) -> Tensor:
    # A sum reads the values once and keeps a NaN or an infinity. It is in fp32: an fp16 sum could
    # overflow to an infinity by itself.
    return torch.isfinite(values.sum(dtype=torch.float32))
