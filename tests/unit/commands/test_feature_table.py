"""A feature that has an entry in the table of facts is shown everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megapack import Layout, build_dp_schedule
from megapack.job.view.page import plan_page
from megapack.outlook.stats import step_report
from megapack.plan import facts
from megapack.plan.facts import Fact, Feature, RowFact
from tests.hand_made_orders import split_plan
from tests.unit.job.view.test_operation_views import COST, picture

pytestmark = pytest.mark.unit

Call = Callable[..., tuple[int, str, str]]

# As if rows of the samples 0 to 2 were a feature of their own.
EARLY = Feature(
    "early samples",
    "search",
    "2048",
    "4096",
    lambda counts: f"some of {counts.num_samples}",
    (Fact("num_samples", "num_early", "early"),),
    RowFact(
        "early", lambda mb: sum(i < 3 for i in mb.samples), "{} early", lambda mb: "~", "early"
    ),
)


@pytest.fixture(autouse=True)
def fifth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The table has one feature more."""
    monkeypatch.setattr(facts, "FEATURES", (*facts.FEATURES, EARLY))
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(split_plan().to_json())


def test_show_has_its_line_its_marks_and_its_phrases(call: Call) -> None:
    assert "; early samples: some of 10\n" in call("show", "plan.json")[1]
    out = call("show", "plan.json", "--rank", "0")[1]
    assert (
        "2:2300[5200:7000]~, 2300 tokens: samples 0,1; sample 0, tokens 5200 to 7000; 2 ea" in out
    )


def test_simulate_has_its_column_and_its_number(call: Call) -> None:
    head, step, *_ = call("simulate", "plan.json")[1].splitlines()
    assert (head.split()[-1], step.split()[-1]) == ("early", "10")
    assert '"num_samples": 10' in call("simulate", "plan.json", "--json")[1]


def test_an_explanation_has_its_line() -> None:
    plan = build_dp_schedule([5, 3], layout=Layout(), max_tokens_per_gpu=8)
    (gain,) = (gain for gain in plan.explain().gains if gain.name == "early samples")
    assert gain.refusal.startswith("search=")


def test_reports_and_metrics_have_it() -> None:
    plan = split_plan()
    report = step_report(plan, plan.steps[0])
    assert "early samples: some of 10" in report.lines()
    assert facts.step_metrics(report)["num_early"] == 10


def test_pages_and_pictures_have_it() -> None:
    page = plan_page(split_plan(), None, COST, "token times")
    assert dict(page.facts)["early samples"] == "some of 10"
    assert page.steps[0]["tracks"][0]["rows"][3][3] == {"early": "1 early"}
    assert ">early<" in picture(split_plan())
