"""Pictures and pages of micro-batches over several DP ranks."""

from __future__ import annotations

import re

import numpy as np
import pytest

from megapack import CostModel, Layout, Plan, build_dp_schedule
from megapack.job.view.page import page_html, plan_page, typical_step
from megapack.job.view.plot import draw_steps
from megapack.job.view.timeline import planned
from tests.hand_made_plan import LENGTHS, wide_plan

pytestmark = pytest.mark.unit

COST = CostModel(per_token=1.0)


def narrow_plan() -> Plan:
    return build_dp_schedule(LENGTHS, layout=Layout(dp=4, pp=2), max_tokens_per_gpu=9000)


def picture(plan: Plan) -> str:
    step = typical_step([planned(plan, 0, 0, None)])
    return draw_steps({"one": step}, "token times", "svg").decode()


def test_a_picture_frames_what_several_ranks_share() -> None:
    svg = picture(wide_plan())
    assert "over several ranks" in svg
    # 8 operations on each of 4 + 2 ranks, 4 joined begins, 1 in the legend.
    assert len(re.findall(r"stroke: #cc0066", svg)) >= 6 * 8 + 4 + 1
    assert "#cc0066" not in picture(narrow_plan())


def test_a_page_names_the_ranks_of_each_row() -> None:
    page = plan_page(wide_plan(), np.array(LENGTHS), COST, "token times")
    facts = dict(page.facts)
    assert facts["wide micro-batches"] == "1 over 2 ranks, 1 over 4 (60.0% of the tokens)"
    assert facts["micro-batches"] == "12, 0 of them padding"
    ranks = [
        [row[3].get("dp_ranks", "") for row in track["rows"]]
        for track in page.steps[0]["tracks"]
        if track["source"] == "planned"
    ]
    assert ranks == [["ranks 0-3", "", "", ""]] * 2 + [["ranks 0-3", "ranks 2-3", "", ""]] * 2
    fills = next(chart for chart in page.histograms if "fill" in chart["title"])
    assert sum(fills["counts"]) == 12
    assert fills["high"] == 100
    assert "drawShared" in page_html(page)
