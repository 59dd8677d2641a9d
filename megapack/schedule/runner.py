"""Megatron's `forward_backward_func` over the packed rows of one step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from megapack.layout import Layout
from megapack.model.adapters import begin_row
from megapack.model.attention.packed import row_params
from megapack.model.experts.model import ModelRouting
from megapack.model.experts.rows import token_weight
from megapack.model.overlap import apart_from_earlier
from megapack.model.recurrent.driven import driving
from megapack.model.weight_gradients import WeightGradients
from megapack.plan.plan import StepPlan
from megapack.ranks.place import Place
from megapack.rows.chain import Link, link_rows
from megapack.rows.packed import PackedRow, PlacedRow
from megapack.rows.schedule_pass import SchedulePass
from megapack.schedule import checks
from megapack.schedule.ahead import Ahead, Encoded, StepImages
from megapack.schedule.call import StepCall
from megapack.schedule.channels import Channels, Exchange, StageOrder
from megapack.schedule.faults import FiniteFlags, StepOutOfMemory, samples_text, stages_of
from megapack.schedule.forward import ForwardStep, HeadOptions, LastStage, PassContext
from megapack.schedule.listeners import Listener, Listeners, PlaceKeeper
from megapack.schedule.megatron_call import MegatronCall
from megapack.schedule.operations import Operations
from megapack.schedule.p2p import PlannedP2PCommunicator, width_between_stages
from megapack.schedule.row_groups import RowGroups
from megapack.schedule.row_rules import row_features


@dataclasses.dataclass(eq=False)
class ScheduleRunner:
    """Runs rows through the model chunks of this rank.

    Attributes:
        listeners: are called at each forward and backward.
        row_groups: the ranks that share each row.
        channels: connect the stages for lists of operations, once they are made.
    """

    communicator_class: ClassVar[type[PlannedP2PCommunicator]] = PlannedP2PCommunicator
    """Exchanges rows of planned lengths between stages; a subclass may set another class."""

    chunks: list[torch.nn.Module]
    """As in `ScheduleAdapter`, like `config` and `layout`."""
    config: Any
    layout: Layout
    groups: Any
    """Megatron's process groups."""
    head: HeadOptions
    """Options of the last stage."""
    device: torch.device
    """Rows are moved to it."""
    routing: ModelRouting
    """The routing of the model's experts."""
    place: Place
    """The runner keeps it up to date."""
    ahead: Ahead | None = None
    """Encodes images; None: batches have none."""

    def __post_init__(self) -> None:
        groups = self.groups
        self.listeners: list[Listener] = [PlaceKeeper(self.place)]
        self.row_groups = RowGroups(self.layout, cp=groups.cp, dp_cp=groups.dp_cp)
        self.channels = Channels(groups.pp, self.layout.vpp)
        self._weight_gradients = WeightGradients(self.chunks)
        # The step plan and what its stage runs, of this step and the next one.
        self._orders: dict[tuple[int, bool], tuple[StepPlan, StageOrder]] = {}

    @property
    def modules(self) -> list[Any]:
        """The chunks, and the tower if there is one."""
        return self.chunks if self.ahead is None else [*self.chunks, self.ahead.tower]

    def run(
        self, call: StepCall, rows: list[PackedRow], images: StepImages | None = None
    ) -> SchedulePass:
        """Run all rows of this rank: forward, and in training also backward and reduction.

        Args:
            images: those of the step; None: it has none.

        Returns:
            This rank's sums and outputs. Recorded routing is in `rows`.

        Raises:
            ScheduleError: on every rank, if an output or a gradient of one is not finite.
            StepOutOfMemory: on this rank; the others wait for it inside the schedule.
        """
        self.place.enter("schedule")
        replica = self.groups.dp.rank()
        flags = FiniteFlags(
            stages_of(self.groups.pp, len(self.chunks)),
            replica,
            first_ranks=[mb.ranks(replica)[0] for mb in call.rows(replica)],
            reads_gradients=not self.config.fp16,
        )
        is_training = call.is_training
        weight = token_weight(call.step_plan) if is_training else None
        schedule_pass = SchedulePass(record=call.record_routing, token_weight=weight)
        listeners = [*self.listeners, flags]
        context = PassContext(schedule_pass=schedule_pass, listeners=listeners, flags=flags)
        try:
            self.run_schedule(call, rows, context, images)
        except torch.OutOfMemoryError as error:
            raise StepOutOfMemory.of(error, rows, self.place) from error
        finally:
            begin_row(None)
        if is_training and not checks.reduces(self.chunks):
            params = [list(module.parameters()) for module in self.modules]
            flags.check_gradients([[p.grad for p in own if p.grad is not None] for own in params])
        self.place.enter("output")
        flags.refuse(lambda k: samples_text(rows[k].samples), device=self.device)
        return context.schedule_pass

    def run_schedule(
        self, call: StepCall, rows: list[PackedRow], context: PassContext, images: StepImages | None
    ) -> None:
        """Encode images, call Megatron's schedule or run the operations of the plan's order, and
        run the tower's backward."""
        encoded = None
        listeners = Listeners(context.listeners)
        if self.ahead is not None and images is not None:
            self.place.enter("images")
            encoded = self.ahead.encode(images, listeners, is_training=call.is_training)
        placed = self.placed(call, rows, encoded)
        forward_step = self.forward_step(call, context)
        megatron = MegatronCall(
            chunks=self.chunks,
            config=self.config,
            pp_group=self.groups.pp,
            place=self.place,
            flags=context.flags,
            is_training=call.is_training,
            group_size=call.step_plan.group_size,
        )
        has_features = row_features(call.plan, call.rows(self.groups.dp.rank()))
        finalize = self.config.finalize_model_grads_func
        if finalize is None and checks.reduces(self.chunks):
            finalize = finalize_model_grads
        with (
            megatron.running(
                variable=call.has_planned_rows,
                # A list of operations keeps what is being sent.
                keeps_outputs=call.executor == "megatron",
                finalize=finalize,
            ),
            apart_from_earlier(self.modules) if call.is_training else contextlib.nullcontext(),
            self.routing.following(context.schedule_pass),
            driving(self.chunks if has_features else ()),
        ):
            if call.executor == "megatron":
                megatron.run(
                    get_forward_backward_func(),
                    self._row_shapes(placed) if call.has_planned_rows else None,
                    self.groups,
                    self.communicator_class,
                    forward_step_func=forward_step,
                    data_iterator=[enumerate(placed) for _ in self.chunks],
                    model=self.chunks,
                    num_microbatches=len(placed),
                    seq_length=placed[0].row_tokens,
                    micro_batch_size=1,
                    forward_only=not call.is_training,
                )
            else:
                self._run_operations(call, placed, forward_step, context)
            if self.ahead is not None and encoded is not None:
                self.place.enter("images")
                self.ahead.backward(encoded, listeners)

    def _run_operations(
        self, call: StepCall, rows: list[PlacedRow], forward_step: ForwardStep, context: PassContext
    ) -> None:
        order = self.stage_order(call)
        exchange = None
        if self.layout.pp > 1:
            width = width_between_stages(self.config)
            exchange = Exchange(
                channels=self.channels,
                order=order,
                shapes=[(*shape, width) for shape in self._row_shapes(rows)],
                dtype=self.config.pipeline_dtype,
                device=self.device,
                place=self.place,
            )
        Operations(
            chunks=self.chunks,
            config=self.config,
            groups=self.groups,
            forward_step=forward_step,
            rows=rows,
            order=order,
            exchange=exchange,
            weight_gradients=self._weight_gradients,
            listeners=Listeners(context.listeners),
            is_training=call.is_training,
            reduces_after=call.has_weight_operations or self._weight_gradients.puts_off_always,
            device=self.device,
        ).run()

    def stage_order(self, call: StepCall) -> StageOrder:
        """What this stage runs in a call. It is kept for this call and the next one.

        Raises:
            PlanError: the plan's order cannot run.
        """
        step = call.step_plan
        key = id(step), call.is_training
        kept = self._orders.get(key)
        if kept is None or kept[0] is not step:
            dp_rank = self.groups.dp.rank()
            order = step.order(dp_rank, self.layout, forward_only=not call.is_training)
            ranks = []
            if call.is_training and step.orders:
                block = next(b for b in step.meeting_ranks(self.layout) if dp_rank in b)
                ranks = [step.orders[rank] for rank in block]
            kept = step, StageOrder(order, self.groups.pp.rank(), self.layout.vpp, ranks)
            self._orders = dict([*self._orders.items()][-1:]) | {key: kept}
        return kept[1]

    def placed(
        self, call: StepCall, rows: list[PackedRow], encoded: Encoded | None = None
    ) -> list[PlacedRow]:
        """The rows on the device, with what a pass over all of them needs."""
        links = link_rows(rows, keeps_gradients=call.is_training, device=self.device)
        return [self._placed(row, link, encoded) for row, link in zip(rows, links, strict=True)]

    def _placed(self, row: PackedRow, link: Link | None, encoded: Encoded | None) -> PlacedRow:
        images = None
        if self.ahead is not None and encoded is not None:
            images = self.ahead.row(row, encoded)
        row = row.to(self.device)
        group = self.row_groups.of(row)
        routing = row.routing
        if routing is not None:
            groups = self.row_groups.routing(row)
            routing = dataclasses.replace(routing, groups=groups, link=link)
        params = row_params(row, group, link, images)
        return PlacedRow.of(row, routing=routing, params=params, cp_group=group, link=link)

    def forward_step(self, call: StepCall, context: PassContext) -> ForwardStep:
        """Megatron's forward step for a call."""
        last_stage = LastStage(
            objective=call.objective,
            with_entropy=call.with_entropy,
            options=self.head,
            schedule_pass=context.schedule_pass,
            note=context.flags.note_losses,
        )
        return ForwardStep(self.chunks, last_stage, context)

    def _row_shapes(self, rows: list[PlacedRow]) -> list[tuple[int, int]]:
        """(tokens, batch size) of each row's hidden states on this GPU."""
        shards = self.layout.tp if self.layout.sequence_parallel else 1
        return [(row.tokens_T.numel() // shards, 1) for row in rows]


def process_groups() -> ProcessGroupCollection:
    """The groups that Megatron's schedules need in addition to a communicator."""
    # Megatron-Core 0.19 asks for the last three as well.
    names = ["tp", "cp", "pp", "embd", "pos_embd", "dp", "tp_dp_cp", "dp_cp"]
    return ProcessGroupCollection.use_mpu_process_groups(names)


@contextlib.contextmanager
def evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the block, the chunks are in evaluation mode."""
    # Remember the mode per module: a user may keep some of them in evaluation mode while training.
    modes = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
