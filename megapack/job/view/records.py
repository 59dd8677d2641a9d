"""A run's folder, read back without torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megapack.base.arrays import Ints
from megapack.base.files import read_text, strict_json
from megapack.cost.model import CostModel
from megapack.errors import ConfigError, DataError, PlanError, first_line
from megapack.job.data.files import unreadable
from megapack.job.data.lengths import Columns, read_length_file
from megapack.pipeline.simulator import EVENT_KINDS, Event
from megapack.plan.file import read_plan
from megapack.plan.order import KINDS
from megapack.plan.plan import Plan
from megapack.plan.text import COST

METRICS_FILE = "metrics.jsonl"
TRACE_FILE = "trace.jsonl"
PLAN_FILE = "plan.json"
LENGTHS_FILE = "lengths.txt"

T = TypeVar("T")


@dataclass(frozen=True)
class TracedStep:
    """Measured times of a step's operations."""

    number: int
    """The step's number in the run, from 1."""
    plan: Plan
    """A plan of this one step."""
    cost: CostModel | None
    """Cost model of the run; None if it had none."""
    is_calibrated: bool
    """Whether the cost model was measured; its seconds then need no scale."""
    events: tuple[Event, ...]
    """Times are measured seconds since a barrier of all ranks."""


@dataclass(frozen=True)
class RunRecords:
    """The files of a run's folder."""

    name: str
    metrics: tuple[dict[str, Any], ...]
    """Lines of metrics.jsonl; `step` is an int in each."""
    plan: Plan
    """Plan of the last batch."""
    cost: CostModel | None
    """Cost model that it was made with; None if the run did not write it."""
    lengths: Ints | None
    """Lengths of the last batch; None if the run did not write them."""
    traced: tuple[TracedStep, ...]
    """Steps traced by `train.trace_steps`."""

    def seconds(self, number: int) -> float | None:
        """Seconds that the run predicted for a step, or else measured; None if it did neither."""
        line = next((line for line in self.metrics if line["step"] == number), {})
        values = (line.get("step_predicted_s"), line.get("step_measured_s"))
        return next(filter(None, map(number_or_none, values)), None)


def read_run(folder: str | Path) -> RunRecords:
    """Read a run folder.

    Raises:
        DataError: a file is missing or broken; the message names the file and the line.
        PlanError: the same for plan.json.
    """
    path = Path(folder)
    lengths = path / LENGTHS_FILE
    trace = path / TRACE_FILE
    plan = path / PLAN_FILE
    return RunRecords(
        name=path.resolve().name,
        metrics=tuple(_lines(path / METRICS_FILE, _metrics)),
        plan=read_plan(plan),
        cost=_plan_cost(plan),
        lengths=read_length_file(str(lengths), Columns()).lengths if lengths.exists() else None,
        traced=tuple(_lines(trace, _traced)) if trace.exists() else (),
    )


def number_or_none(value: Any) -> float | None:
    """A value of metrics.jsonl as a finite number; NaN and infinity are text there."""
    known = type(value) in (int, float) and abs(value) <= sys.float_info.max
    return float(value) if known else None


def _lines(path: Path, read: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    try:
        # A killed run may leave half a line at the end.
        lines = read_text(path).split("\n")[:-1]
    except (OSError, ValueError) as error:
        raise unreadable(path, error, "give the folder of a run") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield read(strict_json(line))
        except KeyError as error:
            raise _bad_line(path, number, f"no {error}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise _bad_line(path, number, first_line(error)) from None


def _bad_line(path: Path, number: int, reason: str) -> DataError:
    return DataError(
        f"{path}: line {number} is not a run's record ({reason}); give the folder as a run left it"
    )


def _plan_cost(path: Path) -> CostModel | None:
    try:
        return _cost(strict_json(read_text(path)).get(COST))
    except ConfigError as error:
        raise DataError(f"{path}: {error}") from None


def _cost(fields: Any) -> CostModel | None:
    return None if fields is None else CostModel.from_json(json.dumps(fields))


def _metrics(line: dict[str, Any]) -> dict[str, Any]:
    if type(line["step"]) is not int:
        raise ValueError("step is not an integer")
    return line


def _traced(line: dict[str, Any]) -> TracedStep:
    plan = Plan.from_json(json.dumps(line["plan"]))
    if len(plan.steps) != 1 or len(plan.steps[0].ranks) != plan.layout.dp:
        raise PlanError(f"{len(plan.steps)} steps, or a rank is missing")
    events = tuple(Event(*event) for event in line["events"])
    layout = plan.layout
    if any(mb.row_tokens < 1 for rank in plan.steps[0].ranks for mb in rank):
        raise PlanError("a row of 0 tokens")
    for event in events:
        counts = ((event.rank, layout.dp), (event.stage, layout.pp), (event.chunk, layout.vpp))
        if not all(0 <= index < count for index, count in counts):
            raise ValueError(f"an event outside of {layout}")
        first = 0 if event.kind in KINDS else -1
        if not first <= event.microbatch < len(plan.steps[0].ranks[event.rank]):
            raise ValueError(f"micro-batch {event.microbatch} of rank {event.rank}")
        is_time = -math.inf < event.start <= event.end < math.inf
        if event.kind not in EVENT_KINDS or not is_time:
            raise ValueError(f"an event {event.kind!r} from {event.start} to {event.end}")
    cost = _cost(line.get(COST))
    is_calibrated = line.get("is_calibrated", cost is not None)
    return TracedStep(_metrics(line)["step"], plan, cost, is_calibrated is True, events)
