"""Steps as timelines: planned by the simulator, or measured in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megapack.cost.model import CostModel
from megapack.job.view.records import RunRecords
from megapack.pipeline.simulator import Event, simulate_planned
from megapack.plan.plan import Plan, StepPlan


@dataclass(frozen=True)
class Timeline:
    """When each operation of one step runs."""

    source: str
    """"planned", "measured", or how else the samples are packed."""
    number: int
    """The step's number, from 0 in a plan and from 1 in a run."""
    plan: Plan
    """The plan that has the step's layout and budget."""
    step: StepPlan
    events: tuple[Event, ...]

    @cached_property
    def rank_ends(self) -> list[float]:
        """End of each DP rank's last micro-batch."""
        ends = np.zeros(self.plan.layout.dp)
        for event in self.events:
            if event.microbatch >= 0:
                ends[event.rank] = max(ends[event.rank], event.end)
        return [float(end) for end in ends]

    @property
    def end(self) -> float:
        """End of the step, images after the last micro-batch included."""
        return max(event.end for event in self.events)


def planned(
    plan: Plan, index: int, number: int, cost: CostModel | None, source: str = "planned"
) -> Timeline:
    """The timeline of a plan's step as the simulator runs it.

    Args:
        index: index of the step in the plan.
        number: the number to show for it.
        cost: seconds of micro-batches; None: those of `cost_in_tokens`.

    Raises:
        PlanError: the step has an M that Megatron would not run.
    """
    step = plan.steps[index]
    run = simulate_planned(plan, step, cost)
    return Timeline(source, number, plan, step, run.events)


def traced(records: RunRecords, cost: CostModel | None) -> list[Timeline]:
    """Two timelines of each traced step of a run: first the planned, then the measured one.

    Args:
        cost: cost model in seconds; None uses the run's. If the run's was not measured, the planned
            timeline is scaled to the seconds that the run predicted for the step, or to the
            measured seconds if it predicted none.
    """
    timelines = []
    for step in records.traced:
        simulated = planned(step.plan, 0, step.number, cost or step.cost)
        measured = Timeline("measured", step.number, step.plan, step.plan.steps[0], step.events)
        if cost is None and not step.is_calibrated:
            simulated = scaled(simulated, records.seconds(step.number) or measured.end)
        timelines += [simulated, measured]
    return timelines


def last_batch(records: RunRecords, cost: CostModel | None) -> list[Timeline]:
    """The planned timelines of a run's last batch, in seconds.

    Args:
        cost: cost model in seconds; None uses the run's, scaled as in `traced`, and leaves out
            steps that the run has not finished.
    """
    plan = records.plan
    ran = [m["step"] for m in records.metrics if m.get("plan_digest") == plan.digest()[:12]]
    # A plan can be made again, of the same batch in a later epoch.
    again = (len(ran) - 1) // len(plan.steps) * len(plan.steps)
    first = ran[again] if ran else len(records.metrics) + 1
    timelines = []
    for index in range(len(plan.steps)):
        seconds = records.seconds(first + index)
        if cost is not None or seconds:
            timeline = planned(plan, index, first + index, cost or records.cost)
            timelines.append(timeline if cost or not seconds else scaled(timeline, seconds))
    return timelines


def scaled(timeline: Timeline, end: float) -> Timeline:
    """The timeline with all times multiplied so that it ends then."""
    factor = end / timeline.end
    events = (
        replace(event, start=event.start * factor, end=event.end * factor)
        for event in timeline.events
    )
    return replace(timeline, events=tuple(events))


def typical_ranks(ends: Sequence[float], most: int) -> list[int]:
    """At most `most` DP ranks: all in order, or evenly spaced ones from the slowest to the fastest.

    With ends [5, 1, 4, 2, 3] and most=3: ranks [0, 4, 1], which end at 5, 3 and 1.
    """
    if len(ends) <= most:
        return list(range(len(ends)))
    slowest_first = sorted(range(len(ends)), key=lambda rank: (-ends[rank], rank))
    last = len(ends) - 1
    return [slowest_first[(i * last + (most - 1) // 2) // max(1, most - 1)] for i in range(most)]
