"""Pictures of steps."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest

from megapack import ConfigError, Layout, build_dp_schedule
from megapack.job.view.plot import draw_step, draw_timelines
from megapack.job.view.timeline import planned
from megapack.outlook.stats import step_report
from megapack.plan import Plan
from tests.run_folder import make_plan

pytestmark = pytest.mark.unit


def drawn(plan: Plan, number: int, unit: str, suffix: str) -> bytes:
    """A picture of a simulated step."""
    report = step_report(plan, plan.steps[number])
    return draw_step(planned(plan, number, number, None), report, unit, suffix)


SIGNATURES = {"png": b"\x89PNG\r\n", "svg": b"<?xml", "pdf": b"%PDF-"}


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_every_format_is_reproducible(suffix: str) -> None:
    timelines = {"one": planned(make_plan(), 0, 0, None)}
    picture = draw_timelines(timelines, "seconds", suffix)
    assert picture.startswith(SIGNATURES[suffix])
    assert picture == draw_timelines(timelines, "seconds", suffix)


def test_a_picture_has_its_title_and_labels() -> None:
    plan = make_plan()
    svg = drawn(plan, 1, "token times", "svg").decode()
    assert f"step 1 of plan {plan.digest()[:12]}: dp=2 tp=1 pp=2 vpp=2" in svg
    for text in ("rank 0", "rank 1", "forward", "backward", "samples per row", "token times"):
        assert f">{text}" in svg, text
    assert "of 2 DP ranks" not in svg


def test_some_of_many_ranks_are_drawn() -> None:
    lengths = [16 + i % 37 for i in range(96)]
    plan = build_dp_schedule(lengths, layout=Layout(dp=12), max_tokens_per_gpu=128)
    timeline = planned(plan, 0, 0, None)
    svg = drawn(plan, 0, "token times", "svg").decode()
    assert "8 of 12 DP ranks, from the slowest to the fastest" in svg
    slowest = timeline.rank_ends.index(max(timeline.rank_ends))
    assert f">rank {slowest}<" in svg


def test_a_picture_has_the_colours_of_both_directions() -> None:
    import matplotlib.image

    picture = draw_timelines({"one": planned(make_plan(), 0, 0, None)}, "s", "png")
    pixels = (matplotlib.image.imread(io.BytesIO(picture))[..., :3] * 255).round().astype(int)
    for colour in ((0x56, 0xB4, 0xE9), (0xE6, 0x9F, 0x00)):
        assert (pixels == colour).all(axis=-1).mean() > 0.01


def test_count_based_plans_and_rows_over_the_budget() -> None:
    counted = build_dp_schedule([8, 4, 6, 2], layout=Layout(), micro_batch_size=2)
    assert b"over the longest row" in drawn(counted, 0, "s", "svg")
    plan = make_plan()
    tight = replace(plan, max_tokens_per_gpu=512)
    assert b"over the budget" in drawn(tight, 0, "s", "svg")


def test_the_error_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        drawn(make_plan(), 0, "s", "png")
