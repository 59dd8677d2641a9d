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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.errors import ScheduleError
from megapack.model.overlap import overlaps_reduction
from megapack.ranks.agree import agree
from megapack.ranks.place import Place
from megapack.rows.packed import PackedRow, PlacedRow
from megapack.schedule import checks
from megapack.schedule.listeners import Listener

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


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """The losses of a row, or of all rows of a chain, [R]: which token one that is not finite comes
    from, and what its numbers were.

    The tensors are those that the last stage has made anyway. They are read if a step's loss or
    gradients are not finite, so other steps never wait for them.
    """

    rows: Sequence[PlacedRow]
    order_R: Tensor | None
    """Index of each loss among those of the rows, one row after the other; None: in their order."""
    losses_R: Tensor
    values_R: Tensor
    """Log-probs, or values of a value head."""
    fields: Mapping[str, Tensor]
    reads: str
    """What `values_R` is, for the text."""

    @property
    def largest(self) -> float:
        """The largest absolute loss; an infinity stands for a NaN."""
        sizes_R = self._sizes()
        return float(sizes_R.max()) if sizes_R.numel() else 0.0

    def worst(self) -> str:
        """The token with the largest loss and its numbers; of equal ones, as in a loss of a whole
        sample, the one whose log-prob is the furthest from that of another policy."""
        sizes_R = self._sizes()
        if not sizes_R.numel():
            return "no token has a loss"
        fields = {name: one for name, one in self.fields.items() if one.shape == sizes_R.shape}
        gaps_R = torch.zeros_like(sizes_R)
        for name, one_R in fields.items():
            if name.endswith("logprobs"):
                gap_R = (self.values_R.double() - one_R).abs().nan_to_num(nan=math.inf)
                gaps_R = torch.maximum(gaps_R, gap_R)
        at = int(torch.where(sizes_R == sizes_R.max(), gaps_R, -1.0).argmax())
        numbers = {"loss": self.losses_R, self.reads: self.values_R, **fields}
        own = ", ".join(f"{name} {one_R[at].item():.6g}" for name, one_R in numbers.items())
        return f"{self._place(at)} has {own}"

    def _sizes(self) -> Tensor:
        return self.losses_R.double().abs().nan_to_num(nan=math.inf)

    def _place(self, at: int) -> str:
        if self.order_R is not None:
            at = int(self.order_R[at])
        for row in self.rows:
            losses = row.losses
            if at < losses.sample_of_R.numel():
                break
            at -= losses.sample_of_R.numel()
        index = int(losses.sample_of_R[at])
        token = int(losses.label_index_R[at]) - sum(row.lengths[:index])
        label = int(row.labels_T[losses.positions_R[at]])
        return f"token {token} of sample {row.samples[index]} (from 0, prompt included; id {label})"


class Spot(NamedTuple):
    """Where a value was not finite."""

    replica: int
    """The data-parallel rank; the first of those that share the micro-batch."""
    microbatch: int | None
    """None for gradients, which are sums over all micro-batches."""
    order: int
    """The spot with the lowest order came first in its replica."""


@dataclass(eq=False)
class FiniteFlags(Listener):
    """Whether this rank's outputs, losses and gradients of one step are finite."""

    stages: Sequence[int] = (0,)
    """For each of its chunks, the index of its stage in the whole model, see `stages_of`."""
    replica: int = 0
    """The data-parallel rank."""
    first_ranks: Sequence[int] = ()
    """For each micro-batch the first of the DP ranks that share it. A NaN spreads among them in the
    attention of the next chunk, or of the same one."""
    reads_gradients: bool = True
    """Not under fp16, where the loss scaler handles an overflow."""

    def __post_init__(self) -> None:
        self._outputs: dict[tuple[int, int], tuple[Tensor, bool]] = {}
        self._gradients: list[tuple[int, Tensor]] = []
        self._noted: TokenLosses | None = None
        self._losses: dict[int, TokenLosses] = {}

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
        if self.reads_gradients:
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
        first = self.first_ranks[microbatch] if self.first_ranks else self.replica
        return Spot(first, microbatch, self.stages[chunk])

    def _gradient_spot(self, chunk: int) -> Spot:
        return Spot(self.replica, None, -self.stages[chunk])

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


def stages_of(pp_group: Any, num_chunks: int) -> list[int]:
    """The model's stages that a pipeline rank has.

    Megatron assigns them in turn: with pp=2 and vpp=2, rank 1 has stages 1 and 3.
    """
    return [chunk * pp_group.size() + pp_group.rank() for chunk in range(num_chunks)]


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
