"""Megatron's `forward_backward_func` over the packed rows of one step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megapack import settings
from megapack.experts import ModelRouting
from megapack.forward import DeviceRow, ForwardStep, LastStage, RowForward
from megapack.layout import Layout
from megapack.microbatch_events import HeardForward, Kind, Listener
from megapack.non_finite import FiniteFlags
from megapack.out_of_memory import OutOfMemoryCarrier
from megapack.p2p import NotingP2PCommunicator, PlannedP2PCommunicator
from megapack.place import Place
from megapack.plan import Plan, StepPlan
from megapack.routing import RoutingPass, RoutingRow
from megapack.run_context import config_for
from megapack.thd import PackedRow

Rows = tuple[list[PackedRow], list[RoutingRow | None]]
"""The packed rows of a step on this rank, and how routers see each."""


class ScheduleRunner:
    """Runs rows through the model chunks of this rank.

    Args:
        chunks, config, layout: see `ScheduleAdapter`.
        groups: Megatron's process groups.
        device: where rows go.
        routing: of the model's experts.
        place: kept up to date.
        retries_oom: see `ScheduleAdapter`.

    Attributes:
        listeners: told of each forward and backward.
        flags: of the last step, whether this rank had numbers everywhere.
    """

    communicator_class = PlannedP2PCommunicator
    """What carries planned rows between stages; a subclass may set one of its own."""

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        config: Any,
        layout: Layout,
        groups: Any,
        *,
        device: torch.device,
        routing: ModelRouting,
        place: Place,
        retries_oom: bool,
    ) -> None:
        self.chunks, self.config, self.layout = chunks, config, layout
        self.device, self.routing, self.place = device, routing, place
        self.listeners: list[Listener] = [_PlaceKeeper(place)]
        self._groups, self._retries_oom = groups, retries_oom
        self.flags = self._new_flags()
        self._carrier: OutOfMemoryCarrier | None = None

    def run(
        self,
        plan: Plan,
        step: StepPlan,
        packed: Rows,
        last_stage: LastStage,
        routers: RoutingPass,
        *,
        forward_only: bool,
    ) -> None:
        """All rows of this rank, forward and, unless `forward_only`, backward and reduction.

        Raises:
            StepOutOfMemory: under `retries_oom`, on every rank.
        """
        rows, seen = packed
        device_rows = [
            DeviceRow(row, self.device, routing) for row, routing in zip(rows, seen, strict=True)
        ]
        planned = plan.policy.row_shape == "planned"
        communicator = None
        if self.layout.pp > 1:
            communicator = self._communicator(rows, step, planned, forward_only)
        self.flags = self._new_flags()
        listeners = [*self.listeners, self.flags]
        forward: ForwardStep = HeardForward(RowForward(last_stage, routers), self.chunks, listeners)
        carrier = OutOfMemoryCarrier(self.config, self.device) if self._retries_oom else None
        self._carrier = carrier
        with (
            contextlib.nullcontext() if carrier is None else carrier.backwards(),
            config_for(self.config, self._overrides(step, planned)),
            self.routing.following(routers),
        ):
            get_forward_backward_func()(
                forward_step_func=forward if carrier is None else carrier.forward(forward),
                data_iterator=[iter(device_rows) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(rows),
                seq_length=rows[0].row_tokens,
                micro_batch_size=1,
                forward_only=forward_only,
                p2p_communicator=communicator,
                pg_collection=None if communicator is None else self._groups,
            )
        if isinstance(communicator, PlannedP2PCommunicator):
            assert communicator.num_pending == 0, "a planned receive is missing"
        if carrier is not None and carrier.agree():
            self.routing.forget_choices()
            carrier.raise_on_all()
        if not forward_only and not settings.reduces(self.chunks):
            params = [list(chunk.parameters()) for chunk in self.chunks]
            self._look_at([[p.grad for p in own if p.grad is not None] for own in params])

    def _new_flags(self) -> FiniteFlags:
        pp = self._groups.pp
        # Megatron deals the stages of the model out to pipeline ranks in turn.
        stages = [chunk * pp.size() + pp.rank() for chunk in range(len(self.chunks))]
        return FiniteFlags(stages, self._groups.dp.rank())

    def _communicator(
        self, rows: list[PackedRow], step: StepPlan, planned: bool, forward_only: bool
    ) -> NotingP2PCommunicator:
        layout, groups = self.layout, self._groups
        shards = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        communicator = NotingP2PCommunicator(groups.pp, self.config)
        if planned:
            communicator = self.communicator_class(
                groups.pp,
                self.config,
                row_lengths=[row.row_tokens // shards for row in rows],
                vpp=layout.vpp,
                group_size=step.group_size,
                forward_only=forward_only,
            )
        communicator.place = self.place
        return communicator

    def _overrides(self, step: StepPlan, planned: bool) -> dict[str, Any]:
        overrides: dict[str, Any] = {"variable_seq_lengths": planned and self.layout.pp > 1}
        if self.layout.vpp > 1:
            overrides["microbatch_group_size_per_vp_stage"] = step.group_size
            # Megatron-Core before 0.19 frees a stage's output while its isend still reads it.
            overrides["deallocate_pipeline_outputs"] = False
        finalize = self.config.finalize_model_grads_func
        if finalize is None and settings.reduces(self.chunks):
            finalize = finalize_model_grads
        if finalize is not None:
            overrides["finalize_model_grads_func"] = self._watched(finalize)
        return overrides

    def _watched(self, finalize: Callable[..., None]) -> Callable[..., None]:
        """The reduction of gradients, before which this rank's own are looked at."""

        def finalize_model_grads(*args: Any, **kwargs: Any) -> None:
            self.place.enter("reduction")
            self._look_at(
                [[b.grad_data for b in settings.gradient_buffers(chunk)] for chunk in self.chunks]
            )
            if self._carrier is None or not self._carrier.agree():
                finalize(*args, **kwargs)

        return finalize_model_grads

    def _look_at(self, gradients: list[list[Tensor]]) -> None:
        # Under fp16 an overflow is what the loss scaler waits for.
        if not self.config.fp16:
            self.flags.look_at_gradients(gradients)


class _PlaceKeeper(Listener):
    """Writes into this rank's place which forward or backward began last."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def begins(self, kind: Kind, chunk: int, microbatch: int) -> None:
        self._place.enter("forward" if kind == "F" else "backward", chunk, microbatch)
