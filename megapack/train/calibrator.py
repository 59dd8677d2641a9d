"""`Calibrator`: measures a run's forwards and backwards, and fits the cost model to them.

    steps -> marks -> seconds of each row -> every k steps: one fit on all ranks -> the next plans

Marks are CUDA events on a GPU, which are read when the step has ended, and the host's clock
elsewhere. Nothing waits for a mark. A forward or backward begins after its input has arrived, so
that waiting for other stages does not count.

Every `calibrate_interval` steps the ranks add up the sums of their rows, rank 0 fits a model to
them, and all ranks get its bits. `cost/slowness.py` says whose seconds do not count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megapack.base.arrays import Floats
from megapack.checkpoint.checkpoints import CalibrationState, Checkpoints
from megapack.checkpoint.folders import Checkpoint
from megapack.config.sections import PlanConfig
from megapack.cost.fit import Measurement
from megapack.cost.model import CostModel
from megapack.cost.online import (
    ChunkSeconds,
    OnlineFit,
    measured_seconds,
    predicted_seconds,
    relative_error,
)
from megapack.cost.slowness import MovedStages, SlowRanks, Verdict
from megapack.errors import CheckpointError, first_line
from megapack.layout import Layout
from megapack.pipeline.simulator import simulate_planned
from megapack.plan.plan import Plan, StepPlan
from megapack.ranks.agree import agree
from megapack.schedule.adapter import ScheduleAdapter
from megapack.schedule.listeners import Kind
from megapack.train.folder import RunFolder
from megapack.train.marks import Recorder, reports_for_stage, seconds_between
from megapack.train.metrics import StepClock
from megapack.view.records import CALIBRATION_FILE

# Tensors of a checkpoint. Columns of a row: the step of its window, the chunk, its measurement.
_ROWS = "rows"
_SUMS = "sums"
_NUM_COLUMNS = 2 + len(Measurement._fields)


class Calibrator:
    """The cost model in force, and its fit to the run's own seconds if the config asks for it.

    All ranks call its methods in the same order; `resume` and `finish_step` are collectives.

    Args:
        config: `calibrate` and `calibrate_interval`.
        adapter: runs the steps.
        layout: the resolved layout.
        start: the cost model of the run's beginning.
        device: see `agree`.

    Attributes:
        is_on: the config asks for it.
        start: the cost model of the run's beginning.
        is_start_measured: it is that of `plan.cost_model`.
        next_cost: the model for the next batch that is planned. It is the one that was in force
            when the steps of the batch before began, as the plan is made while these run.
        num_fits: fits so far.
    """

    def __init__(
        self,
        config: PlanConfig,
        adapter: ScheduleAdapter,
        layout: Layout,
        start: CostModel,
        *,
        device: torch.device,
    ) -> None:
        self.is_start_measured = config.cost_model is not None
        self.start = start
        self.next_cost = start
        self.num_fits = 0
        self.is_on = config.calibrate == "online"
        self._interval = config.calibrate_interval
        self._adapter = adapter
        self._layout = layout
        self._device = device
        self._fit = OnlineFit(layout, start)
        self._slow_ranks = SlowRanks()
        self._moved_stages = MovedStages(layout, start)
        # Rows of each step since the last fit.
        self._window: list[list[ChunkSeconds]] = []
        self._recorder: Recorder | None = None
        self._start_clock = StepClock(is_calibrated=self.is_start_measured)
        # Of a run that resumed inside a batch: the model for the batch after it.
        self._resumed_next: CostModel | None = None
        # Whether `load` has been called.
        self._is_resumed = False

    @property
    def cost(self) -> CostModel:
        """The cost model in force."""
        return self._fit.model

    def begin(self, folder: RunFolder, number: int) -> None:
        """Call when the run's folder is open, on the rank that writes.

        Notes the cost model of the beginning, unless the run goes on with fits that are there.

        Args:
            number: steps that the run has done.
        """
        if not self.is_on or (self._is_resumed and (folder.path / CALIBRATION_FILE).exists()):
            return
        folder.append_line(CALIBRATION_FILE, _line(number, 0, self.start))

    def begin_batch(self) -> None:
        """Call when a batch is planned and its steps are about to begin."""
        self.next_cost = self._resumed_next or self.cost
        self._resumed_next = None

    def begin_step(self) -> None:
        """Call right before a step."""
        if self.is_on:
            self._recorder = Recorder()
            self._adapter.runner.listeners.append(self._recorder)

    def predictions(self, plan: Plan, step: StepPlan, measured_s: float) -> dict[str, float | None]:
        """What the cost model of the run's beginning predicts for a step; {} if none is fitted.

        Args:
            measured_s: what the step took.
        """
        if not self.is_on:
            return {}
        makespan = simulate_planned(plan, step, self.start).makespan
        predicted_s = self._start_clock.predict(makespan)
        self._start_clock.record(makespan, measured_s)
        return {"step_predicted_at_start_s": predicted_s}

    def finish_step(self, step: StepPlan, number: int, folder: RunFolder | None) -> list[str]:
        """Call after a step; every `calibrate_interval` steps it fits the model.

        Args:
            step: the step that ran.
            number: its number in the run, from 1.
            folder: the run folder on the rank that writes; None on all others.

        Returns:
            What turned out slow, or is fast again, a sentence each.
        """
        recorder = self._recorder
        assert recorder is not None
        self._recorder = None
        self._adapter.runner.listeners.remove(recorder)
        rows = self._measured(recorder, step)
        self._window.append(rows if reports_for_stage() else [])
        if number % self._interval:
            return []
        return self._fit_window(number, folder)

    def state(self, batch_cost: CostModel | None) -> CalibrationState | None:
        """What a checkpoint keeps; None if the model is not fitted.

        Args:
            batch_cost: the model that the batch in progress was planned with; None between batches.
        """
        if not self.is_on:
            return None
        rows = [
            [float(number), *_flat(measured)]
            for number, step in enumerate(self._window)
            for measured in step
        ]
        plain = {
            "start": asdict(self.start),
            "cost": asdict(self.cost),
            "batch_cost": asdict(batch_cost or self.next_cost),
            "next_cost": None if batch_cost is None else asdict(self.next_cost),
            "num_fits": self.num_fits,
            "num_window_steps": len(self._window),
            "slow_ranks": [list(rank) for rank in self._slow_ranks.slow],
            "stage_weights": self._moved_stages.weights.tolist(),
        }
        tensors = {
            _ROWS: torch.tensor(rows, dtype=torch.float64).reshape(len(rows), _NUM_COLUMNS),
            # Only rank 0 adds to them.
            _SUMS: torch.from_numpy(self._fit.sums.copy()),
        }
        return CalibrationState(plain, tensors)

    def resume(self, checkpoints: Checkpoints, checkpoint: Checkpoint) -> bool:
        """Go on with the cost models of a checkpoint, if it has some for this layout. A collective.

        Returns:
            Whether the model in force is now that of the checkpoint.

        Raises:
            ScheduleError: a rank cannot read them.
        """

        def load() -> bool:
            saved = checkpoints.load_calibration(checkpoint)
            if saved is not None:
                self.load(saved)
            return saved is not None

        return self.is_on and agree(load, device=self._device)

    def load(self, saved: CalibrationState) -> None:
        """Go on where `state` was taken on the same layout.

        Raises:
            CheckpointError: no run has written this.
        """
        plain = saved.plain
        try:
            self.start = _cost(plain["start"])
            self._fit.model = _cost(plain["cost"])
            self._fit.sums[:] = saved.tensors[_SUMS].numpy()
            self.next_cost = _cost(plain["batch_cost"])
            following = plain["next_cost"]
            self._resumed_next = None if following is None else _cost(following)
            self.num_fits = int(plain["num_fits"])
            self._slow_ranks.slow = tuple((int(d), int(s)) for d, s in plain["slow_ranks"])
            self._moved_stages.weights = np.array(plain["stage_weights"], dtype=np.float64)
            self._window = [[] for _ in range(plain["num_window_steps"])]
            for number, *values in saved.tensors[_ROWS].tolist():
                self._window[int(number)].append(_row(values))
            self._is_resumed = True
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"the checkpoint's calibration cannot be read ({first_line(error)}); resume with "
                "plan.calibrate=off, or from another checkpoint"
            ) from None

    @property
    def _stage(self) -> int:
        return int(parallel_state.get_pipeline_model_parallel_rank())

    def _measured(self, recorder: Recorder, step: StepPlan) -> list[ChunkSeconds]:
        """The rows that this rank ran, with their seconds."""
        rows = step.ranks[self._adapter.dp_rank]
        found = []
        for (chunk, microbatch), seconds in _seconds(recorder).items():
            mb = rows[microbatch]
            weights = seconds.get("W")
            measurement = Measurement(
                mb.row_tokens,
                mb.tokens_sq,
                len(mb.samples),
                seconds["F"],
                seconds["B"] + (weights or 0.0),
                mb.width,
                weights,
            )
            # A clock may be too coarse for a row of few tokens.
            if min(seconds.values()) > 0:
                found.append(ChunkSeconds(chunk * self._layout.pp + self._stage, measurement))
        return found

    def _fit_window(self, number: int, folder: RunFolder | None) -> list[str]:
        steps = self._window
        self._window = []
        before = self.cost
        window = self._summed(self._fit.window(steps))
        candidate = self._from_rank_0(lambda: self._fit.candidate(window, len(steps)))
        verdict = self._judge(steps, candidate)
        if verdict.left_out.any():
            left_out = verdict.left_out[self._adapter.dp_rank, self._stage]
            kept = [[] if out else rows for rows, out in zip(steps, left_out, strict=True)]
            window = self._summed(self._fit.window(kept))
        self._fit.model = self._from_rank_0(lambda: self._fit.take(window, len(steps)))
        self.num_fits += 1
        messages = [*verdict.messages, *self._moved_stages.judge(self.cost)]

        def write() -> None:
            if folder is not None:
                line = _line(
                    number,
                    self.num_fits,
                    self.cost,
                    error_before=relative_error(window, before, self._layout),
                    error_after=relative_error(window, self.cost, self._layout),
                    num_left_out=int(verdict.left_out.sum()),
                    messages=messages,
                )
                folder.append_line(CALIBRATION_FILE, line)

        agree(write, device=self._device)
        return messages

    def _judge(self, steps: Sequence[Sequence[ChunkSeconds]], candidate: CostModel) -> Verdict:
        """What the window shows; the same on all ranks."""
        layout = self._layout
        ratios = np.zeros((layout.dp, layout.pp, len(steps)))
        own = ratios[self._adapter.dp_rank, self._stage]
        for number, rows in enumerate(steps):
            if rows:
                predicted = predicted_seconds(rows, candidate, layout)
                own[number] = measured_seconds(rows) / predicted
        # Each number is one rank's, so that adding them up has no rounding.
        return self._slow_ranks.judge(self._summed(ratios))

    def _summed(self, own: Floats) -> Floats:
        total = torch.from_numpy(own).to(self._device)
        dist.all_reduce(total)
        summed: Floats = total.cpu().numpy()
        return summed

    def _from_rank_0(self, make: Callable[[], CostModel]) -> CostModel:
        """The model that rank 0 makes; its text holds every bit."""
        text = agree(lambda: make().to_json() if dist.get_rank() == 0 else "", device=self._device)
        texts = [text]
        dist.broadcast_object_list(texts, src=0, device=self._device)
        return CostModel.from_json(texts[0])


def _seconds(recorder: Recorder) -> dict[tuple[int, int], dict[Kind, float]]:
    """Seconds of each kind by chunk and micro-batch; the step has ended on the device."""
    found: dict[tuple[int, int], dict[Kind, float]] = {}
    for kind, chunk, microbatch, begin, end in recorder.spans:
        found.setdefault((chunk, microbatch), {})[kind] = seconds_between(begin, end)
    return found


def _line(
    step: int,
    num_fits: int,
    cost: CostModel,
    *,
    error_before: float | None = None,
    error_after: float | None = None,
    num_left_out: int = 0,
    messages: Sequence[str] = (),
) -> dict[str, Any]:
    """A line of calibration.jsonl."""
    return {
        "step": step,
        "num_fits": num_fits,
        "cost": asdict(cost),
        "error_before": error_before,
        "error_after": error_after,
        "num_left_out": num_left_out,
        "messages": list(messages),
    }


def _flat(measured: ChunkSeconds) -> list[float]:
    """A row as numbers; NaN for what was not measured."""
    return [
        float(measured.chunk),
        *(float("nan") if value is None else float(value) for value in measured.row),
    ]


def _row(values: Sequence[float]) -> ChunkSeconds:
    """The inverse of `_flat`."""
    chunk, tokens, tokens_sq, samples, forward_s, backward_s, width, weight_s = values
    row = Measurement(
        int(tokens),
        int(tokens_sq),
        int(samples),
        forward_s,
        None if math.isnan(backward_s) else backward_s,
        int(width),
        None if math.isnan(weight_s) else weight_s,
    )
    return ChunkSeconds(int(chunk), row)


def _cost(fields: Mapping[str, Any]) -> CostModel:
    return CostModel.from_json(json.dumps(fields))
