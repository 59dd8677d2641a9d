"""A step as a list of operations: what Megatron's schedules do, in any legal order.

Each operation is Megatron's own `forward_step` or `backward_step`, or the weight gradients of a
backward that left them out. What the schedules do around them happens here: settings of DDP, loss
scales, freeing of outputs that were sent, and the reduction of gradients at the end. In
Megatron's order the results have the bits of its schedules.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type
from torch import Tensor

from megapack.model.overlap import overlaps_reduction
from megapack.model.weight_gradients import WeightGradients
from megapack.plan.order import Operation
from megapack.rows.packed import PlacedRow
from megapack.schedule.channels import Exchange, StageOrder
from megapack.schedule.listeners import Listeners

# Megatron-Core 0.16 asks for the type of the model, 0.19 does not.
_ASKS_MODEL_TYPE = "model_type" in inspect.signature(schedules.backward_step).parameters


@dataclass(kw_only=True, eq=False)
class Operations:
    """One pass over a step's rows, operation after operation."""

    chunks: Sequence[Any]
    """As in `ScheduleRunner`, like `config` and `groups`."""
    config: Any
    groups: Any
    forward_step: Callable[..., Any]
    """Megatron's `forward_step_func`; its iterator gives (micro-batch, row)."""
    rows: Sequence[PlacedRow]
    """Of this rank, on the device."""
    order: StageOrder
    """What this stage runs."""
    exchange: Exchange | None
    """With the other stages; None without."""
    weight_gradients: WeightGradients
    """Those of the chunks."""
    listeners: Listeners
    """Are told of weight gradients; `forward_step` tells them of forwards and backwards."""
    is_training: bool
    """Whether backwards run and gradients are reduced."""
    reduces_after: bool
    """A chunk's reduction starts after its last operation and not inside it: DDP does not learn
    when late weight gradients are ready. It is the same on all DP ranks."""
    device: torch.device

    def __post_init__(self) -> None:
        self._communication = _Communication(
            self.chunks,
            self.config,
            self.order,
            is_first_stage=self.groups.pp.rank() == 0,
            reduces_after=self.reduces_after,
        )
        self._reports: list[Any] = []
        self._num_tokens = torch.zeros((), dtype=torch.int, device=self.device)
        # Input and output of each chunk and micro-batch between its forward and its backward.
        self._held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._begun_chunks: set[int] = set()
        operations = self.order.operations
        self._put_off = {(op.chunk, op.microbatch) for op in operations if op.kind == "W"}

    def run(self) -> None:
        """Run all operations, and finalize the gradients."""
        try:
            self._run()
        finally:
            # Some are left if the step has failed.
            self.weight_gradients.drop()

    def _run(self) -> None:
        config = self.config
        run_one = {"F": self._forward, "B": self._backward, "W": self._weight_gradients}
        with self._communication if self.is_training else contextlib.nullcontext():
            for index, op in enumerate(self.order.operations):
                if self.exchange is not None:
                    self.exchange.post(index)
                if self.is_training:
                    self._communication.before(index)
                run_one[op.kind](op)
                if self.is_training:
                    self._communication.after(index)
        if self.exchange is not None:
            self.exchange.finish()
        if self.is_training and config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                list(self.chunks),
                self._num_tokens if config.calculate_per_token_loss else None,
                pg_collection=self.groups,
                force_all_reduce=False,
            )

    def _forward(self, op: Operation) -> None:
        input_tensor = None
        if self.exchange is not None:
            input_tensor = self.exchange.receive("activations", op.microbatch, op.chunk)
        is_first = op.chunk not in self._begun_chunks
        self._begun_chunks.add(op.chunk)
        sends = self._sends(op)
        output, num_tokens = schedules.forward_step(
            self.forward_step,
            iter([(op.microbatch, self.rows[op.microbatch])]),
            self.chunks[op.chunk],
            len(self.rows),
            input_tensor,
            self._reports,
            self.config,
            cp_group_size=self.groups.cp.size(),
            is_first_microbatch=is_first,
            current_microbatch=op.microbatch,
            vp_stage=op.chunk if len(self.chunks) > 1 else None,
            is_last_stage=not sends,
        )
        self._num_tokens += num_tokens
        if sends:
            assert self.exchange is not None
            self.exchange.send("activations", output)
        if self.is_training:
            self._held[op.chunk, op.microbatch] = input_tensor, output
            if sends:
                free = self.config.deallocate_pipeline_outputs
                schedules.deallocate_output_tensor(output, free)

    def _backward(self, op: Operation) -> None:
        gradient = None
        if self.exchange is not None:
            gradient = self.exchange.receive("gradients", op.microbatch, op.chunk)
        input_tensor, output = self._held.pop((op.chunk, op.microbatch))
        arguments = [input_tensor, output, gradient]
        if _ASKS_MODEL_TYPE:
            arguments.append(get_model_type(self.chunks[op.chunk]))
        is_split = (op.chunk, op.microbatch) in self._put_off
        deferring = self.weight_gradients.deferring(op.chunk, op.microbatch)
        with deferring if is_split else contextlib.nullcontext():
            input_gradient = schedules.backward_step(*arguments, self.config)
        if self._sends(op):
            assert self.exchange is not None
            self.exchange.send("gradients", input_gradient)
        if not is_split:
            self.weight_gradients.finish_joint(op.chunk)

    def _weight_gradients(self, op: Operation) -> None:
        self.listeners.begin("W", op.chunk, op.microbatch)
        self.weight_gradients.run(op.chunk, op.microbatch)
        self.listeners.end("W", op.chunk, op.microbatch)

    def _sends(self, op: Operation) -> bool:
        """Whether another stage waits for the operation's result."""
        pp = self.groups.pp
        chunk = op.chunk * pp.size() + pp.rank()
        end = len(self.chunks) * pp.size() - 1 if op.kind == "F" else 0
        return bool(chunk != end)


class _Communication:
    """Communication of DDP in a training step; between operations, DDP is in `no_sync`.

    A chunk's reduction starts inside its last backward, or after its last operation: by the
    config's `grad_sync_func`, or by DDP itself if it overlaps. On all ranks the last chunk starts
    first. Under interleaving all stages call `param_sync_func` and `grad_sync_func` at the same
    time: when the first stage begins or has ended a chunk.

    DP ranks that meet inside of forwards and backwards start between the same two of these: what a
    rank starts must be in one order for all that take part in it.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        config: Any,
        order: StageOrder,
        *,
        is_first_stage: bool,
        reduces_after: bool,
    ) -> None:
        vpp = len(chunks)
        self._chunks = chunks
        self._order = order
        self._no_sync = _listed(config.no_sync_func, 1)
        self._grad_sync = _listed(config.grad_sync_func, vpp)
        self._gathers = deque(_listed(config.param_sync_func, vpp) if vpp > 1 else [])
        # As in Megatron's schedules: without interleaving the first stage, which has no time left
        # after its last backward, reduces inside of it.
        is_called_after = bool(self._grad_sync) and (vpp > 1 or not is_first_stage)
        self._reduces_after = reduces_after or is_called_after
        self._waits_for_first = is_called_after and vpp > 1
        # Index of the last operation of each chunk of this stage.
        self._ends = {op.chunk: index for index, op in enumerate(order.operations)}
        self._num_reduced = 0
        self._off = contextlib.ExitStack()
        self._is_off = False

    def __enter__(self) -> None:
        self._switch_off()
        self._gather(2)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._reduce(len(self._order.operations))
        self._switch_on()

    def before(self, index: int) -> None:
        """The operation of this index begins next."""
        level = self._order.levels[index]
        self._gather(2 + sum(first <= level for first in self._order.first_levels[1:]))
        if not self._reduces_after and self._ends[self._order.operations[index].chunk] == index:
            self._switch_on()

    def after(self, index: int) -> None:
        """The operation of this index has run."""
        self._switch_off()
        self._reduce(index)

    def _switch_off(self) -> None:
        if not self._is_off:
            for no_sync in self._no_sync:
                self._off.enter_context(no_sync())
        self._is_off = True

    def _switch_on(self) -> None:
        self._off.close()
        self._is_off = False

    def _gather(self, num_chunks: int) -> None:
        """Gather the parameters of the first chunks, unless that has begun."""
        while self._gathers and len(self._chunks) - len(self._gathers) < num_chunks:
            chunk = len(self._chunks) - len(self._gathers)
            self._gathers.popleft()(self._chunks[chunk].parameters())

    def _reduce(self, index: int) -> None:
        """Start to reduce chunks that have ended by the operation of this index."""
        if not self._reduces_after:
            return
        levels = self._order.levels
        while self._num_reduced < len(self._chunks):
            chunk = len(self._chunks) - 1 - self._num_reduced
            if self._ends[chunk] > index:
                return
            ended = self._order.end_levels[chunk]
            if self._waits_for_first:
                ended = max(ended, self._order.last_levels[chunk])
            if index < len(levels) and levels[index] < ended:
                return
            self._num_reduced += 1
            if self._grad_sync:
                self._grad_sync[chunk](self._chunks[chunk].parameters())
            elif overlaps_reduction(self._chunks[chunk]):
                self._chunks[chunk].start_grad_sync()


def _listed(functions: Any, count: int) -> list[Any]:
    """A setting of Megatron's config that may be a function, one for each chunk, or None."""
    if functions is None:
        return []
    return list(functions) if isinstance(functions, list) else [functions] * count
