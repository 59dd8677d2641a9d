"""Pictures and pages of steps with pieces of samples and weight gradients."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from megapack import CostModel, Plan, check_plan
from megapack.job.view.page import page_html, plan_page, typical_step
from megapack.job.view.plot import draw_steps
from megapack.job.view.timeline import planned
from tests.hand_made_orders import LENGTHS, split_plan
from tests.hand_made_plan import wide_plan

pytestmark = pytest.mark.unit

COST = CostModel(fixed=10.0, per_token=1.0, per_token_sq=1e-4)


def picture(plan: Plan) -> str:
    step = typical_step([planned(plan, 0, 0, COST)])
    return draw_steps({"one": step}, "token times", "svg").decode()


def test_a_picture_has_weight_gradients_and_frames_around_pieces() -> None:
    check_plan(split_plan(), LENGTHS)
    svg = picture(split_plan())
    assert "weight gradients" in svg
    assert "piece of a sample" in svg
    # F, B and W of 3 pieces on 2 stages, one in the legend.
    assert len(re.findall(r"stroke: #1a1a1a", svg)) >= 3 * 3 * 2 + 1
    plain = picture(wide_plan())
    assert "weight gradients" not in plain
    assert "piece of a sample" not in plain


def test_narrow_pieces_have_no_outline_that_hides_their_colour() -> None:
    """Boxes of a few pixels have only their lower edge: there and back, as a shape."""
    step = typical_step([planned(split_plan(), 0, 0, COST)])
    assert frames_of(step, "#1a1a1a") == {5}
    assert frames_of(step | {"end": 40 * step["end"]}, "#1a1a1a") == {3}


def frames_of(step: dict[str, Any], colour: str) -> set[int]:
    """Corners of the shapes that are drawn with this edge, beside the legend's."""
    svg = draw_steps({"one": step}, "token times", "svg").decode().split('id="legend_1"')[0]
    paths = re.findall(rf'<path d="([^"]*)"[^>]*stroke: {colour}', svg)
    return {len(re.findall("[ML]", path)) for path in paths}


def test_a_page_has_the_kinds_and_the_pieces() -> None:
    page = plan_page(split_plan(), np.array(LENGTHS), COST, "token times")
    facts = dict(page.facts)
    assert facts["split samples"] == "1 in 3 pieces (44.6% of the tokens)"
    assert facts["split backwards"] == "20"
    first, _, second, next_fit = page.steps[0]["tracks"]
    assert [row[3].get("piece") for row in first["rows"]] == [
        "sample 0, tokens 0 to 2800",
        "sample 0, tokens 2800 to 5200",
        "sample 0, tokens 5200 to 7000",
        None,
        None,
    ]
    for track in (first, second):
        assert Counter(event[3] for event in track["events"]) == {0: 10, 1: 10, 2: 10}
    # Simple packing has no pieces.
    assert not any("piece" in row[3] for row in next_fit["rows"])
    html = page_html(page)
    assert "drawPieces" in html
    assert 'id="weights"' in html
