"""What a call runs on this rank: checked, and packed into rows; local work, on a thread."""

from __future__ import annotations

from typing import NamedTuple

from megapack.errors import DataError
from megapack.model import weight_gradients
from megapack.model.head import unwrapped
from megapack.model.mtp import num_depths
from megapack.model.recurrent.heads import check_heads
from megapack.plan.check import check_plan
from megapack.plan.plan import MicroBatch
from megapack.rows.packed import PackedRow
from megapack.rows.packing import pack_row
from megapack.rows.slices import slice_row
from megapack.schedule import checks
from megapack.schedule.ahead import StepImages
from megapack.schedule.call import StepCall
from megapack.schedule.row_rules import check_rows, row_features
from megapack.schedule.runner import ScheduleRunner


class Packed(NamedTuple):
    """What a call runs, packed on this rank."""

    rows: list[PackedRow]
    images: StepImages | None
    """None: the batch has none."""


class Packer:
    """Checks calls and packs their rows.

    Args:
        runner: runs the rows.
        head, vocab_size: see `ScheduleAdapter`.
    """

    def __init__(self, runner: ScheduleRunner, head: checks.Head, vocab_size: int | None) -> None:
        self._runner = runner
        self._head = head
        self._vocab_size = vocab_size
        self._dp_rank = int(runner.groups.dp.rank())
        self._checked_digest = ""
        self._runs_on_megatron = False

    def pack(self, call: StepCall) -> Packed:
        """This rank's rows and images of a call.

        Raises:
            ConfigError, DataError, PlanError: this rank cannot run it.
        """
        plan, runner = call.plan, self._runner
        chunks, config, layout = runner.chunks, runner.config, runner.layout
        if plan.layout != layout:
            raise DataError(f"the plan is for {plan.layout}, the adapter for {layout}")
        checks.check_head(chunks, self._head)
        if call.has_planned_rows:
            checks.check_planned_rows(config, plan.policy)
        checks.check_counts(plan, config)
        features = row_features(plan, call.rows(self._dp_rank))
        if "wide" in features:
            runner.row_groups.check(self._dp_rank)
        check_rows(chunks, config, features, is_training=call.is_training)
        shared_by = {layout.cp * row.width for row in call.step_plan.microbatches}
        check_heads(map(unwrapped, chunks), shared_by)
        if plan.digest() != self._checked_digest:
            check_plan(plan, call.batch.lengths)
            self._checked_digest = plan.digest()
        checks.check_config(config, layout)
        if call.executor == "operations":
            checks.check_operations(config)
            runner.stage_order(call)
            if call.has_weight_operations:
                weight_gradients.check(chunks, config)
        elif not self._runs_on_megatron:
            # Layers are built so: later steps need not walk over all modules.
            weight_gradients.check_none_puts_off(chunks)
            self._runs_on_megatron = True
        if call.is_training:
            checks.check_reduction(config, chunks, layout)
        call.check(self._head)
        rows = [self._packed(call, microbatch) for microbatch in call.rows(self._dp_rank)]
        rows = runner.routing.with_routing(rows, call.routing, record=call.record_routing)
        return Packed(rows, self._images(call))

    def _images(self, call: StepCall) -> StepImages | None:
        if not (call.batch.has_images or call.step_plan.images):
            return None
        ahead = self._runner.ahead
        if ahead is None:
            raise DataError(
                "the batch has images and the adapter no tower; give ScheduleAdapter(vision=...)"
            )
        return ahead.prepare(call.step_plan, call.batch)

    def _packed(self, call: StepCall, microbatch: MicroBatch) -> PackedRow:
        plan = call.plan
        row = pack_row(
            call.batch,
            microbatch,
            plan.layout,
            call.sample_weights,
            call.field_names,
            plan.colocate_ids,
            self._vocab_size,
            plan.prefix_table,
            num_depths(self._runner.config),
        )
        return slice_row(row, *self._runner.row_groups.slice_of(microbatch, self._dp_rank))
