"""The HTML page: its content, its limits, and that no text in it becomes markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack import CostModel, Layout, build_dp_schedule
from megapack.job.view.page import Page, page_html, plan_page, run_page
from megapack.job.view.records import read_run
from megapack.outlook.baselines import naive_plans
from megapack.outlook.stats import plan_report
from tests.run_folder import LENGTHS, make_plan, write_run

pytestmark = pytest.mark.unit

COST = CostModel(per_token=1.0)


def data(html: str) -> Any:
    """The data of the page's script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


def test_a_plans_page() -> None:
    page = plan_page(make_plan(), np.array(LENGTHS), COST, "token times")
    assert dict(page.facts)["samples"] == str(len(LENGTHS))
    assert [step["label"] for step in page.steps] == ["step 0", "step 1"]
    # Beside the plan, simple packing of the same samples.
    for step in page.steps:
        assert [track["source"] for track in step["tracks"]] == ["planned", "next-fit"] * 2
        samples = [sum(row[0] for row in track["rows"]) for track in step["tracks"]]
        assert samples[0] + samples[2] == samples[1] + samples[3]
    assert [series["name"] for series in page.curves[0]["series"]] == ["planned", "next-fit"]
    lengths, fills, samples = page.histograms
    assert (
        sum(lengths["counts"])
        == sum((i - 0.0) * n for i, n in enumerate(samples["counts"]))
        == len(LENGTHS)
    )
    assert sum(fills["counts"]) == sum(samples["counts"])
    assert data(page_html(page))["steps"] == json.loads(json.dumps(page.steps))
    without = plan_page(make_plan(), None, COST, "s")
    assert len(without.histograms) == 2
    assert {track["source"] for track in without.steps[0]["tracks"]} == {"planned"}


def test_a_plans_page_has_the_step_time_of_simple_packing_too() -> None:
    plan = make_plan()
    next_fit = naive_plans(plan, np.array(LENGTHS))["next-fit"]
    ours, theirs = (plan_report(packed, cost=COST) for packed in (plan, next_fit))
    facts = dict(plan_page(plan, np.array(LENGTHS), COST, "token times").facts)
    assert facts["time, planned"] == f"{ours.seconds:.0f} token times"
    ratio = theirs.seconds / ours.seconds
    assert facts["time, next-fit"] == f"{theirs.seconds:.0f} token times, {ratio:.2f} x planned"
    assert facts["bubble, next-fit"] == f"{theirs.bubble_fraction:.1%}"


def test_packings_are_compared_by_their_slowest_ranks() -> None:
    lengths = [64 + (i * 7919) % 900 for i in range(256)]
    plan = build_dp_schedule(lengths, layout=Layout(dp=8, pp=2), max_tokens_per_gpu=2048)
    (step,) = plan_page(plan, np.array(lengths), COST, "s").steps
    assert step["label"] == "step 0: 4 of 8 DP ranks, slowest first"
    assert ["(slowest)" in track["label"] for track in step["tracks"]] == [True] * 2 + [False] * 6


def test_a_runs_page(tmp_path: Path) -> None:
    page = run_page(read_run(write_run(tmp_path / "run")), None)
    titles = [curve["title"] for curve in page.curves]
    assert titles[:4] == ["step time", "loss", "gradient norm", "tokens per second"]
    predicted, measured = page.curves[0]["series"]
    assert (predicted["y"], measured["y"]) == ([None, 2.0, 2.0, 2.0], [3.0] * 4)
    # A loss of NaN is a gap.
    assert page.curves[1]["series"][0]["y"] == [1.0, 0.5, 1 / 3, None]
    assert [track["label"] for track in page.steps[0]["tracks"]] == [
        f"{source}, rank {rank}{slowest}"
        for rank, slowest in enumerate((" (slowest)", ""))
        for source in ("planned", "measured")
    ]
    assert dict(page.facts)["prediction off by"] == "33.3% in the median step"


def test_a_run_without_traces_shows_its_last_plan(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "trace.jsonl").unlink()
    page = run_page(read_run(folder), None)
    assert [step["label"] for step in page.steps] == ["step 3", "step 4"]
    assert [step["end"] for step in page.steps] == pytest.approx([2.0, 2.0])
    assert {track["source"] for track in page.steps[0]["tracks"]} == {"planned"}
    assert any("train.trace_steps" in note for note in page.notes)


def test_a_run_without_steps_or_traces(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "trace.jsonl").unlink()
    (folder / "metrics.jsonl").write_text("")
    page = run_page(read_run(folder), None)
    assert page.steps == []
    assert any("train.trace_steps" in note for note in page.notes)
    assert data(page_html(page))["curves"][0]["x"] == []


def test_a_page_needs_no_network_and_escapes_all_text() -> None:
    evil = "</script><img src=x onerror=alert(1)>@@STYLE@@&"
    page = Page(title=evil, facts=[(evil, evil)], unit=evil, notes=[evil])
    page.curves = [{"title": evil, "unit": "", "x": [1], "series": [{"name": evil, "y": [1.0]}]}]
    html = page_html(page)
    assert "<img" not in html
    assert html.count("</script>") == 2
    assert html.count("<style>") == 1
    assert data(html)["curves"] == page.curves
    clean = page_html(plan_page(make_plan(), None, COST, "s"))
    assert re.findall(r"""(?:src|href)\s*=|url\(|@import|fetch\(|innerHTML|eval\(""", clean) == []
    addresses = set(re.findall(r"https?://[^\"' ]+", clean))
    assert addresses == {"http://www.w3.org/2000/svg"}


def test_the_page_of_a_large_plan_says_what_it_leaves_out() -> None:
    lengths = [64 + i % 7 for i in range(6144)]
    plan = build_dp_schedule(
        lengths,
        layout=Layout(dp=64, pp=4, vpp=2),
        max_tokens_per_gpu=512,
        global_batch_size=1536,
        policy=replace(make_plan().policy, search=0),
    )
    plan = replace(plan, steps=plan.steps * 9)
    page = plan_page(plan, None, COST, "s")
    assert all("8 of 64 DP ranks" in step["label"] for step in page.steps)
    assert 0 < len(page.steps) < len(plan.steps)
    assert f"timelines of {len(page.steps)} of {len(plan.steps)} steps are shown" in page.notes
    assert len(page_html(page)) < 2_000_000
    assert len(page.curves[0]["x"]) == len(plan.steps)


def test_curves_of_many_steps_skip_steps(tmp_path: Path) -> None:
    records = read_run(write_run(tmp_path / "run"))
    many = tuple({"step": n, "loss": 1.0} for n in range(1, 5002))
    page = run_page(replace(records, metrics=many), None)
    loss = page.curves[1]
    assert loss["title"] == "loss (every 3th step)"
    assert (loss["x"][:3], len(loss["x"])) == ([1, 4, 7], 1667)
