"""Steps as timelines: planned by the simulator, or measured in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megapack.cost.model import CostModel
from megapack.errors import PlanError
from megapack.pipeline.simulator import Event, simulate_planned
from megapack.plan.plan import Plan, StepPlan
from megapack.view.records import RunRecords


@dataclass(frozen=True)
class Timeline:
    """When each forward and backward of one step runs."""

    source: str
    """"planned" or "measured"."""
    number: int
    """The step's number: of a plan from 0, of a run from 1."""
    plan: Plan
    """Layout and budget."""
    step: StepPlan
    events: tuple[Event, ...]

    @property
    def rank_ends(self) -> list[float]:
        """When each DP rank has done its last work."""
        ends = np.zeros(self.plan.layout.dp)
        for event in self.events:
            ends[event.rank] = max(ends[event.rank], event.end)
        return [float(end) for end in ends]

    @property
    def stage_seconds(self) -> list[float]:
        """Work of each DP rank's busiest stage."""
        busy = np.zeros((self.plan.layout.dp, self.plan.layout.pp))
        for event in self.events:
            busy[event.rank, event.stage] += event.end - event.start
        return [float(seconds) for seconds in busy.max(axis=1)]


def planned(plan: Plan, index: int, number: int, cost: CostModel | None) -> Timeline:
    """A plan's step as the simulator runs it.

    Args:
        index: which of the plan's steps.
        number: what to call it.
        cost: seconds of micro-batches; None counts row tokens.

    Raises:
        PlanError: the step's ranks are not those of the layout.
        ScheduleError: a count that Megatron would not run.
    """
    step, layout = plan.steps[index], plan.layout
    if len(step.ranks) != layout.dp:
        raise PlanError(
            f"step {number} has {len(step.ranks)} ranks, the layout dp={layout.dp}; make the plan "
            "again"
        )
    run = simulate_planned(plan, step, cost)
    return Timeline("planned", number, plan, step, run.events)


def traced(records: RunRecords, cost: CostModel | None) -> list[Timeline]:
    """Of each traced step of a run, first what was planned and then what was measured.

    Args:
        cost: in seconds; None takes the run's own. Where it has none, a step takes the seconds
            that the run predicted for it by its tokens, else those that were measured.
    """
    timelines = []
    for step in records.traced:
        own = cost or step.cost
        plan = planned(step.plan, 0, step.number, own)
        measured = Timeline("measured", step.number, step.plan, step.plan.steps[0], step.events)
        if own is None:
            seconds = records.predicted_seconds(step.number) or max(measured.rank_ends)
            plan = scaled(plan, seconds / max(plan.rank_ends))
        timelines += [plan, measured]
    return timelines


def scaled(timeline: Timeline, factor: float) -> Timeline:
    """The same with other units of time."""
    events = (
        replace(event, start=event.start * factor, end=event.end * factor)
        for event in timeline.events
    )
    return replace(timeline, events=tuple(events))


def typical_ranks(ends: Sequence[float], most: int) -> list[int]:
    """At most so many DP ranks: all in their order, or from the slowest to the fastest some that
    are evenly apart, by when they end."""
    if len(ends) <= most:
        return list(range(len(ends)))
    slowest_first = sorted(range(len(ends)), key=lambda rank: (-ends[rank], rank))
    last = len(ends) - 1
    return [slowest_first[(i * last + (most - 1) // 2) // max(1, most - 1)] for i in range(most)]
