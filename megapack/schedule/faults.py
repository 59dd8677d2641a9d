"""How a step handles faults: running out of memory, and values that are not finite.

One rank runs out of memory in a step that may be tried again: the other ranks still wait for the
tensors that the schedule makes this rank send. So it continues the schedule with zeros of the
planned shapes, does no more work, and reports at the step's end; gradients are not reduced. The
process groups stay usable. Ranks that share a row ask each other before each collective inside of
it, see `ranks.meeting`: one that is out of memory answers once in each forward and backward, and
the others then leave it, and do no more work either. Where other ranks communicate inside layers, a
rank could not know which collectives it still has to join.

A NaN or an infinity on one rank is an error of every rank. Each forward sets a flag on the device,
and so do the gradients before their reduction (after it, if it overlaps with backwards: then the
error names every rank of the sum). The flags are read once, at the step's end; only if
one is set do the ranks find out which rank set it. A stage passes a NaN on to the next stage, so
only the first one is reported.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from megapack import cpu
from megapack.errors import ConfigError, ScheduleError, StepOutOfMemory
from megapack.layout import Layout, why_no_retry
from megapack.model.overlap import overlaps_reduction
from megapack.ranks.agree import agree, on_any_rank
from megapack.ranks.meeting import OthersOutOfMemory, asking
from megapack.ranks.place import Place
from megapack.schedule import checks
from megapack.schedule.listeners import Listener
from megapack.schedule.token_losses import TokenLosses

logger = logging.getLogger(__name__)

# Limit on the samples of a micro-batch that an error names.
_MAX_SAMPLES = 8


def check_retry(layout: Layout, config: Any) -> None:
    """Raise ConfigError if a step that runs out of memory could not be tried again.

    DDP communicates inside forwards and backwards only if it overlaps; see `without_overlap`.
    """
    if reason := why_no_retry(tp=layout.tp, cp=layout.cp, ep=layout.ep):
        raise ConfigError(
            f"steps out of memory cannot be tried again with {reason}; set train.on_oom=error "
            "(retries_oom=False)"
        )
    if layout.dp > 1 and checks.shares_fp8_scales(config):
        raise ConfigError(
            f"steps out of memory cannot be tried again with dp={layout.dp} and "
            "fp8_recipe='delayed': ranks share scales after each forward; set "
            "tp_only_amax_red=True, another recipe, or train.on_oom=error (retries_oom=False)"
        )


class OutOfMemoryGuard:
    """Lets one pass over a step's rows run to its end after memory has run out.

    Args:
        device: the device of the collectives' tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._message = ""
        self._has_stopped = False
        # Made ahead: there may be no memory for it when it is needed.
        self._answer = torch.zeros(1, dtype=torch.int32, device=device)
        self._failed_anywhere: bool | None = None

    def attempt(self, work: Callable[[], Any], group: Any = None) -> Any:
        """Run the work; returns None if memory runs out, or has run out before.

        Args:
            group: the ranks that share its row; None: the work is not shared. All of them attempt
                it, and none has a result if one has not.
        """
        is_shared = group is not None and group.size() > 1
        if not self._has_stopped:
            try:
                result = work()
                if is_shared:
                    self._ask(group)
                return result
            except torch.OutOfMemoryError as error:
                self._message = str(error).partition("\n")[0] or "out of memory"
            except OthersOutOfMemory:
                is_shared = False
            self._has_stopped = True
            # Outside of the handlers: inside, the traceback would keep the activations alive.
            if cpu.uses_cuda():
                torch.cuda.empty_cache()
        if is_shared:
            self._answers(group, is_out=True)
        return None

    @contextlib.contextmanager
    def running(self, backwards: Iterable[Any]) -> Iterator[None]:
        """Within the block, a backward that runs out of memory gives Megatron's schedule zeros, and
        ranks that share a row ask each other before they meet.

        Args:
            backwards: the `group` of each backward, in their order.
        """
        original = schedules.backward_step
        groups = iter(backwards)

        def backward_step(input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            # In a list: None is a valid result of the original.
            result = self.attempt(lambda: [original(input_tensor, *args, **kwargs)], next(groups))
            return _zeros(input_tensor) if result is None else result[0]

        schedules.backward_step = backward_step
        try:
            with asking(self._ask):
                yield
        finally:
            schedules.backward_step = original

    def _ask(self, group: Any) -> None:
        if self._answers(group, is_out=False):
            raise OthersOutOfMemory

    def _answers(self, group: Any, *, is_out: bool) -> bool:
        """Whether any rank of the group is out of memory."""
        self._answer.fill_(is_out)
        dist.all_reduce(self._answer, op=dist.ReduceOp.MAX, group=group)
        return bool(self._answer.item())

    def agree(self) -> bool:
        """Whether any rank ran out of memory; the first call is a collective of all ranks."""
        if self._failed_anywhere is None:
            (failed,) = on_any_rank([self._has_stopped], device=self._device)
            self._failed_anywhere = failed
        return self._failed_anywhere

    def raise_on_all(self) -> None:
        """Raise if any rank ran out of memory. A collective of all ranks, at the step's end.

        Raises:
            StepOutOfMemory: on every rank; it names the ranks that ran out.
        """
        if not self.agree():
            return

        def raise_own() -> None:
            if self._message:
                raise StepOutOfMemory(self._message)

        try:
            agree(raise_own, device=self._device)
        except ScheduleError as error:
            raise StepOutOfMemory(str(error)) from None


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
    """

    def __init__(
        self, stages: Sequence[int] = (0,), replica: int = 0, first_ranks: Sequence[int] = ()
    ) -> None:
        self._stages = stages
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
        *,
        pp_rank: int,
        pp: int,
        replica: int,
        first_ranks: Sequence[int] = (),
    ) -> FiniteFlags:
        """The flags of a pipeline rank with `num_chunks` chunks."""
        # Megatron assigns the model's stages to the pipeline ranks in turn: with pp=2 and vpp=2,
        # rank 1 has stages 1 and 3.
        return cls([chunk * pp + pp_rank for chunk in range(num_chunks)], replica, first_ranks)

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


def checking_finalize(
    finalize: Callable[..., None],
    check: Callable[[list[list[Tensor]]], None],
    chunks: Sequence[Any],
    place: Place,
) -> Callable[..., None]:
    """A `finalize_model_grads_func` that first checks this rank's own gradients.

    Reductions that overlap with backwards are running by then, so reduced gradients are checked.

    Args:
        check: is given the gradient buffers of each chunk.
    """
    are_running = any(map(overlaps_reduction, chunks))

    def check_buffers() -> None:
        buffers = [checks.gradient_buffers(chunk) for chunk in chunks]
        check([[buffer.grad_data for buffer in own] for own in buffers])

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


def _zeros(tensors: Any) -> Any:
    if isinstance(tensors, list):
        return [_zeros(tensor) for tensor in tensors]
    return None if tensors is None else torch.zeros_like(tensors)
