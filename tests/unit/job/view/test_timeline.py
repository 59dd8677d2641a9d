"""Timelines of plans and runs, and the choice of typical ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megapack import CostModel, simulate
from megapack.job.view.records import read_run
from megapack.job.view.timeline import last_batch, planned, traced, typical_ranks
from tests.run_folder import LAYOUT, make_plan, write_run

pytestmark = pytest.mark.unit


def test_a_planned_step_has_the_simulated_events() -> None:
    plan = make_plan()
    timeline = planned(plan, 1, 1, None)
    run = simulate(plan.steps[1], layout=LAYOUT)
    assert timeline.events == run.events
    assert timeline.rank_ends == pytest.approx(run.rank_makespans)


def test_planned_steps_scale_to_the_predicted_seconds(tmp_path: Path) -> None:
    records = read_run(write_run(tmp_path / "run"))
    timelines = traced(records, None)
    assert [(t.source, t.number) for t in timelines] == [
        ("planned", 2),
        ("measured", 2),
        ("planned", 3),
        ("measured", 3),
    ]
    assert [max(t.rank_ends) for t in timelines] == pytest.approx([2.0, 3.0, 2.0, 3.0])
    # Without a prediction, planned and measured are equally long.
    unknown = tuple({**line, "step_predicted_s": None} for line in records.metrics)
    timelines = traced(replace(records, metrics=unknown), None)
    assert [max(t.rank_ends) for t in timelines] == pytest.approx([3.0] * 4)


def test_times_of_an_assumed_speed_are_scaled(tmp_path: Path) -> None:
    cost = CostModel(per_token=1e-9, fixed=1e-6)
    records = read_run(write_run(tmp_path / "run", cost=cost, is_calibrated=False))
    assert [step.cost for step in records.traced] == [cost, cost]
    assert [max(t.rank_ends) for t in traced(records, None)[::2]] == pytest.approx([2.0, 2.0])


def test_times_of_a_measured_cost_model_are_not_scaled(tmp_path: Path) -> None:
    own, given = CostModel(per_token=1e-3), CostModel(per_token=2e-3, stage_weights=(1.0,) * 4)
    records = read_run(write_run(tmp_path / "run", cost=own))
    step = records.traced[0].plan.steps[0]
    for cost, used in ((None, own), (given, given)):
        seconds = simulate(step, layout=LAYOUT, cost=used).makespan
        assert max(traced(records, cost)[0].rank_ends) == pytest.approx(seconds)


def test_the_plan_of_the_last_batch_has_the_runs_steps_and_seconds(tmp_path: Path) -> None:
    """The same batch of two steps twice: steps 3 and 4 are the second time."""
    records = read_run(write_run(tmp_path / "run"))
    timelines = last_batch(records, None)
    assert [(t.source, t.number) for t in timelines] == [("planned", 3), ("planned", 4)]
    assert [t.step for t in timelines] == list(records.plan.steps)
    assert [max(t.rank_ends) for t in timelines] == pytest.approx([2.0, 2.0])
    # A run that was stopped within the batch.
    (first,) = last_batch(replace(records, metrics=records.metrics[:3]), None)
    assert first.number == 3
    assert last_batch(replace(records, metrics=()), None) == []
    # Seconds of a given cost model need no scale, and no steps that ran.
    cost = CostModel(per_token=1e-3)
    seconds = [simulate(s, layout=LAYOUT, cost=cost).makespan for s in records.plan.steps]
    for metrics in (records.metrics, ()):
        timelines = last_batch(replace(records, metrics=metrics), cost)
        assert [max(t.rank_ends) for t in timelines] == pytest.approx(seconds)


def test_the_last_batch_runs_by_the_cost_model_of_its_plan(tmp_path: Path) -> None:
    records = read_run(write_run(tmp_path / "run"))
    costly = replace(records, cost=CostModel(fixed=1.0, per_token=1e-9))
    ends = [t.events[0].end for t in (*last_batch(records, None), *last_batch(costly, None))]
    assert len(set(ends)) == 4


@pytest.mark.parametrize(
    ("ends", "most", "ranks"),
    [
        ([3.0, 1.0, 2.0], 3, [0, 1, 2]),
        ([3.0, 1.0, 2.0], 2, [0, 1]),
        ([5.0, 1.0, 4.0, 2.0, 3.0], 3, [0, 4, 1]),
        ([1.0, 2.0], 1, [1]),
        ([1.0, 1.0, 1.0, 1.0], 3, [0, 2, 3]),
    ],
)
def test_typical_ranks(ends: list[float], most: int, ranks: list[int]) -> None:
    assert typical_ranks(ends, most) == ranks
