"""`Calibrator`: measures a run's forwards and backwards, and fits the cost model to them.

    steps -> marks -> seconds of each row -> every k steps: one fit on all ranks -> the next plans

Marks are CUDA events on a GPU, which are read when the step has ended, and the host's clock
elsewhere. Nothing waits for a mark. A forward or backward begins after its input has arrived, so
that waiting for other stages does not count.

Every `calibrate_interval` steps the ranks add up the sums of their rows, rank 0 fits a model to
them, and all ranks get its bits. `cost/slowness.py` says whose seconds do not count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megapack.base.arrays import Floats
from megapack.cost.fit import Measurement
from megapack.cost.model import CostModel
from megapack.cost.online import (
    KEEP,
    ChunkSeconds,
    fit_images,
    fit_sums,
    image_sums,
    row_sums,
    slowness,
)
from megapack.cost.slowness import SlowRanks
from megapack.job.config.sections import PlanConfig
from megapack.job.train.marks import Recorder, reports_for_stage, seconds_between
from megapack.layout import Layout
from megapack.plan.plan import StepPlan
from megapack.ranks.agree import agree
from megapack.ranks.links import Ranks
from megapack.schedule.adapter import ScheduleAdapter
from megapack.schedule.listeners import Kind


@dataclass(eq=False)
class Calibrator:
    """The cost model in force, and its fit to the run's own seconds if the config asks for it.

        with calibrator.step(plan.steps[0], 1) as messages:
            ...                         # the step runs
        calibrator.cost                 # after a fit another one, the same on all ranks

    Attributes:
        num_fits: fits so far.
        metrics: of the last step, if the config asks for a fit.
    """

    config: PlanConfig
    """`calibrate` and `calibrate_interval`."""
    adapter: ScheduleAdapter
    """Runs the steps."""
    layout: Layout
    """The resolved layout."""
    cost: CostModel
    """The cost model in force; at first that of the run's beginning."""
    ranks: Ranks
    """Are told of a rank that fails in a fit."""
    device: torch.device
    """See `agree`."""

    def __post_init__(self) -> None:
        self.num_fits = 0
        self.metrics: dict[str, float] = {}
        self._slow_ranks = SlowRanks()
        # This rank's: sums of the steps until the last fit, and the rows of each step since then.
        self._sums = row_sums((), self.cost, self.layout)
        self._steps: list[list[ChunkSeconds]] = []
        self._image_sums: Floats = np.zeros(8)

    @contextlib.contextmanager
    def step(self, step: StepPlan, number: int) -> Iterator[list[str]]:
        """Measure the step that runs within the block, and fit if it is due. A collective.

        Args:
            step: the step.
            number: its number in the run, from 1.

        Yields:
            A list that gets a sentence for each rank that turned out slow, or is fast again.
        """
        messages: list[str] = []
        if self.config.calibrate != "online":
            yield messages
            return
        recorder = Recorder()
        self.adapter.runner.listeners.append(recorder)
        try:
            yield messages
        finally:
            self.adapter.runner.listeners.remove(recorder)
        started = time.perf_counter()
        with self.ranks.guarded(f"the calibration after step {number}"):
            self.ranks.place.enter("calibration")
            rows = self._measured(recorder, step)
            self._steps.append(rows if reports_for_stage() else [])
            if number % self.config.calibrate_interval == 0:
                messages += self._fit()
        self.metrics = {"calibration_s": time.perf_counter() - started}

    @property
    def _stage(self) -> int:
        return int(parallel_state.get_pipeline_model_parallel_rank())

    def _measured(self, recorder: Recorder, step: StepPlan) -> list[ChunkSeconds]:
        """The rows that this rank ran, with their seconds; the step has ended on the device."""
        seconds_of: dict[tuple[int, int], dict[Kind, float]] = {}
        for kind, chunk, microbatch, begin, end in recorder.spans:
            seconds_of.setdefault((chunk, microbatch), {})[kind] = seconds_between(begin, end)
        rows = step.ranks[self.adapter.dp_rank]
        found = []
        ahead = self.adapter.runner.ahead
        images = seconds_of.pop((0, -1), {})
        if ahead is not None and ahead.encoded_patches and images.get("E", 0.0) > 0:
            own = image_sums(ahead.encoded_patches, images["E"], images.get("T"))
            self._image_sums = KEEP * self._image_sums + own
        for (chunk, microbatch), seconds in seconds_of.items():
            # A clock may be too coarse for a row of few tokens, and a frozen first chunk has no
            # backward.
            if "B" not in seconds or min(seconds.values()) <= 0:
                continue
            mb = rows[microbatch]
            weights = seconds.get("W")
            row = Measurement(
                mb.row_tokens,
                mb.tokens_sq,
                len(mb.samples),
                seconds["F"],
                seconds["B"] + (weights or 0.0),
                mb.width,
                weights,
            )
            found.append(ChunkSeconds(chunk * self.layout.pp + self._stage, row))
        return found

    def _fit(self) -> list[str]:
        """Put the model of all seconds that count into force, and say who turned out slow."""
        steps, self._steps = self._steps, []
        sums, cost = self._fitted(steps)
        own = (self.adapter.dp_rank, self._stage)
        # Each number is one rank's, so that adding them up has no rounding.
        ratios = np.zeros((self.layout.dp, self.layout.pp, len(steps)))
        ratios[own] = [slowness(rows, cost, self.layout) for rows in steps]
        left_out, messages = self._slow_ranks.judge(self._summed(ratios))
        if left_out.any():
            kept = [[] if out else rows for rows, out in zip(steps, left_out[own], strict=True)]
            sums, cost = self._fitted(kept)
        self._sums, self.cost = sums, cost
        self.num_fits += 1
        return messages

    def _fitted(self, steps: Sequence[Sequence[ChunkSeconds]]) -> tuple[Floats, CostModel]:
        """This rank's sums with these steps, and the model of all ranks' sums, by rank 0."""
        sums = self._sums
        for rows in steps:
            sums = KEEP * sums + row_sums(rows, self.cost, self.layout)
        total, of_images = self._summed(sums), self._summed(self._image_sums)

        def fit() -> str:
            if dist.get_rank():
                return ""
            return fit_images(of_images, fit_sums(total, self.cost, self.layout)).to_json()

        # The text holds every bit.
        texts = [agree(fit, device=self.device)]
        dist.broadcast_object_list(texts, src=0, device=self.device)
        return sums, CostModel.from_json(texts[0])

    def _summed(self, own: Floats) -> Floats:
        # A copy: the rank keeps its own.
        total = torch.tensor(own, device=self.device)
        dist.all_reduce(total)
        summed: Floats = total.cpu().numpy()
        return summed
