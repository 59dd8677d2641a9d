"""Trace files for Perfetto."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from megapack.job.view.chrome_trace import chrome_trace
from megapack.job.view.records import read_run
from megapack.job.view.timeline import planned, traced
from tests.run_folder import LAYOUT, make_plan, write_run

pytestmark = pytest.mark.unit


def test_ranks_are_processes_and_stages_are_threads() -> None:
    plan = make_plan()
    timelines = [planned(plan, index, index, None) for index in range(2)]
    trace = json.loads(chrome_trace(timelines, 1.0))["traceEvents"]
    slices = [event for event in trace if event["ph"] == "X"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert sorted(names.values()) == ["planned: DP rank 0", "planned: DP rank 1"]
    assert {event["tid"] for event in slices} == {0, 1}
    counts = Counter((event["args"]["step"], event["name"].split()[0]) for event in slices)
    for step, found in enumerate(plan.steps):
        each = sum(len(rank) for rank in found.ranks) * LAYOUT.pp * LAYOUT.vpp
        assert counts[step, "forward"] == counts[step, "backward"] == each
    assert {event["args"]["row_tokens"] for event in slices} == {
        mb.row_tokens for step in plan.steps for rank in step.ranks for mb in rank
    }
    # The second step begins when the first ends.
    first = [event for event in slices if event["args"]["step"] == 0]
    second = [event for event in slices if event["args"]["step"] == 1]
    end = max(event["ts"] + event["dur"] for event in first)
    assert end == pytest.approx(max(timelines[0].rank_ends), abs=1e-2)
    assert min(event["ts"] for event in second) == pytest.approx(end, abs=1e-2)


def test_planned_and_measured_steps_begin_together(tmp_path: Path) -> None:
    timelines = traced(read_run(write_run(tmp_path / "run")), None)
    trace = json.loads(chrome_trace(timelines))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == [
        f"{source}: DP rank {rank}" for source in ("planned", "measured") for rank in (0, 1)
    ]
    begins = {
        (event["cat"], event["args"]["step"]): event["ts"]
        for event in sorted(trace, key=lambda event: -event.get("ts", 0.0))
        if event["ph"] == "X"
    }
    # Measured takes 3 s, the longer of the two.
    assert begins["planned", 3] == begins["measured", 3] == pytest.approx(3e6)
