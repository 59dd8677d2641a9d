"""Measures when each forward and backward of a step runs, on every rank.

    adapter.step -> a mark before and after each chunk's work -> rank 0 -> trace.jsonl

Steps that are not traced run without these marks.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megapack.cost.model import CostModel
from megapack.job.train.folder import RunFolder
from megapack.job.train.marks import Recorder, mark, reports_for_stage, seconds_between
from megapack.job.view.records import TRACE_FILE
from megapack.plan.plan import Plan
from megapack.ranks.agree import agree
from megapack.schedule.adapter import ScheduleAdapter


class StepTracer:
    """Traces a run's first steps into trace.jsonl, except for the very first, which warms up.

    All ranks make one with the same arguments: a traced step is a collective.

    Args:
        num_steps: number of steps to trace.
        is_calibrated: the cost model of the run's beginning was measured.
    """

    def __init__(self, adapter: ScheduleAdapter, num_steps: int, *, is_calibrated: bool) -> None:
        self._adapter = adapter
        self._is_calibrated = is_calibrated
        self._steps_left = num_steps
        self._is_warm = False

    @contextlib.contextmanager
    def step(
        self, plan: Plan, index: int, number: int, folder: RunFolder | None, cost: CostModel
    ) -> Iterator[None]:
        """Trace the step that runs within the block, if it is to be traced, and write its line.

        Args:
            plan, index: the plan, and the step within it that runs.
            number: the step's number in the run, from 1.
            folder: the run folder on the rank that writes; None on all others.
            cost: the cost model that is in force.
        """
        is_traced = self._is_warm and self._steps_left > 0
        self._is_warm = True
        if not is_traced:
            yield
            return
        self._steps_left -= 1
        recorder = _TraceRecorder()
        self._adapter.runner.listeners.append(recorder)
        try:
            yield
        finally:
            self._adapter.runner.listeners.remove(recorder)
        events = _gather(recorder.events(self._adapter.dp_rank))

        def write() -> None:
            if folder is not None:
                one_step = replace(plan, steps=(plan.steps[index],))
                line = {
                    "step": number,
                    "plan": json.loads(one_step.to_json()),
                    "cost": asdict(cost),
                    "is_calibrated": self._is_calibrated,
                    "events": events,
                }
                folder.append_line(TRACE_FILE, line)

        agree(write, device=torch.device(torch.cuda.current_device()))


class _TraceRecorder(Recorder):
    """Marks of one step on this rank, measured from a barrier that all ranks share."""

    def __init__(self) -> None:
        super().__init__()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        self._begin = mark()

    def events(self, dp_rank: int) -> list[list[Any]]:
        """The fields of each `pipeline.Event`, with seconds from the step's begin."""
        torch.cuda.synchronize()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        since_begin = functools.partial(seconds_between, self._begin)
        return [
            [dp_rank, stage, chunk, microbatch, kind, *map(since_begin, marks)]
            for kind, chunk, microbatch, *marks in self.spans
        ]


def _gather(events: list[list[Any]]) -> list[list[Any]]:
    """Events of all pipelines on rank 0, sorted by DP rank and stage; empty on other ranks."""
    gathered: list[Any] | None = None
    if dist.get_rank() == 0:
        gathered = [None] * dist.get_world_size()
    dist.gather_object(events if reports_for_stage() else [], gathered)
    return sorted(event for part in gathered or [] for event in part)
