"""Pages and traces of plans whose rows share prefixes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megapack import CostModel, Layout, Plan, SharedPrefixes, build_dp_schedule
from megapack.job.view.chrome_trace import chrome_trace
from megapack.job.view.page import page_html, plan_page
from megapack.job.view.timeline import planned

pytestmark = pytest.mark.unit

COST = CostModel(per_token=1.0)
PROMPTS = [60] * 4 + [40] * 4
LENGTHS = [prompt + 10 + k for k, prompt in enumerate(PROMPTS)]


def plan_of(*, shares: bool) -> Plan:
    prefixes = SharedPrefixes.from_groups([k // 4 for k in range(8)], PROMPTS)
    return build_dp_schedule(
        LENGTHS,
        layout=Layout(dp=2, pp=2),
        max_tokens_per_gpu=256,
        prefixes=prefixes if shares else None,
    )


def test_a_page_says_what_is_shared() -> None:
    plan = plan_of(shares=True)
    page = plan_page(plan, np.array(LENGTHS), COST, "token times")
    saved = plan.counts.shared_tokens
    assert dict(page.facts)["shared prefixes"].startswith(f"{saved} of {sum(LENGTHS)} tokens")
    rows = [row for track in page.steps[0]["tracks"] for row in track["rows"]]
    texts = [row[3]["shared_tokens"] for row in rows if row[3]]
    assert sum(int(text.removesuffix(" tokens shared")) for text in texts) == saved
    assert "shared" in page_html(page)
    alone = plan_page(plan_of(shares=False), np.array(LENGTHS), COST, "token times")
    assert "shared prefixes" not in dict(alone.facts)


def test_a_trace_has_the_shared_tokens_of_each_row() -> None:
    plan = plan_of(shares=True)
    trace = json.loads(chrome_trace([planned(plan, 0, 0, None)], 1.0))["traceEvents"]
    args = [(event["pid"], event["args"]) for event in trace if event["ph"] == "X"]
    found = {(pid, own["microbatch"]): own.get("shared_tokens", 0) for pid, own in args}
    assert sum(found.values()) == plan.counts.shared_tokens
