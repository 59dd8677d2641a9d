"""`KeptShapes`: the row shapes of a run, from one batch to the next."""

from __future__ import annotations

from typing import Any

from megapack.job.checkpoint.checkpoints import Checkpoints
from megapack.job.checkpoint.folders import Checkpoint
from megapack.job.data.dataset import SampleNumbers
from megapack.job.train.metrics import Progress
from megapack.job.train.passes import BatchPlanner, PlannedBatch
from megapack.plan.plan import Plan
from megapack.plan.shapes import RowShapes
from megapack.ranks.agree import agree


class KeptShapes:
    """Those of the next batch that is planned, and those that were shown last."""

    def __init__(self) -> None:
        self._next: RowShapes | None = None
        self._shown = ""

    def resume(self, checkpoints: Checkpoints, checkpoint: Checkpoint, device: Any) -> None:
        """Go on with those of a checkpoint. A collective."""
        self._next = agree(lambda: checkpoints.load_row_shapes(checkpoint), device=device)

    def plan(
        self, planner: BatchPlanner, numbers: SampleNumbers, fields: Any, again: Plan | None = None
    ) -> PlannedBatch:
        """Plan the next batch; or with the plan `again` of this one, the batch once more."""
        shapes = self._next if again is None else again.row_shapes
        batch = planner.plan(numbers, fields, shapes)
        self._next = batch.plan.next_row_shapes
        return batch

    def show(self, plan: Plan, step: int, progress: Progress) -> None:
        """A line for the first shapes of a run, and for each change."""
        if plan.row_shapes is not None and str(plan.row_shapes) != self._shown:
            self._shown = str(plan.row_shapes)
            progress.line(f"row shapes from step {step}: {plan.row_shapes}")
