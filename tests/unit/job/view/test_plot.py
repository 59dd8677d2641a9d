"""Pictures of steps."""

from __future__ import annotations

import sys

import pytest

from megapack import ConfigError, Layout, build_dp_schedule
from megapack.job.view.page import typical_step
from megapack.job.view.plot import draw_steps
from megapack.job.view.timeline import planned
from megapack.plan import Plan
from tests.run_folder import make_plan

pytestmark = pytest.mark.unit


def drawn(plan: Plan, suffix: str) -> bytes:
    """A picture of a simulated step."""
    step = typical_step([planned(plan, 0, 0, None)])
    return draw_steps({step["label"]: step}, "token times", suffix, "a heading")


SIGNATURES = {"png": b"\x89PNG\r\n", "svg": b"<?xml", "pdf": b"%PDF-"}


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_every_format_is_reproducible(suffix: str) -> None:
    picture = drawn(make_plan(), suffix)
    assert picture.startswith(SIGNATURES[suffix])
    assert picture == drawn(make_plan(), suffix)


def test_a_picture_has_its_title_and_labels() -> None:
    svg = drawn(make_plan(), "svg").decode()
    for text in ("rank 0", "rank 1", "forward", "backward", "a heading", "step 0"):
        assert f">{text}" in svg, text
    assert "of 2 DP ranks" not in svg


def test_some_of_many_ranks_are_drawn() -> None:
    lengths = [16 + i % 37 for i in range(96)]
    plan = build_dp_schedule(lengths, layout=Layout(dp=12), max_tokens_per_gpu=128)
    timeline = planned(plan, 0, 0, None)
    svg = drawn(plan, "svg").decode()
    assert "8 of 12 DP ranks, slowest first" in svg
    slowest = timeline.rank_ends.index(max(timeline.rank_ends))
    assert f">rank {slowest}<" in svg
    assert svg.count(">(slowest)<") >= 1


def test_one_rank_of_a_picture_is_the_slowest() -> None:
    timeline = planned(make_plan(), 0, 0, None)
    step = typical_step([timeline], most=1)
    slowest = timeline.rank_ends.index(max(timeline.rank_ends))
    assert [track["label"] for track in step["tracks"]] == [f"planned, rank {slowest} (slowest)"]


def test_a_legend_names_what_is_drawn_and_the_axis_its_unit() -> None:
    svg = drawn(make_plan(), "svg").decode()
    assert ">idle<" in svg
    assert ">padding<" not in svg
    assert ">time in token times; " in svg


def test_the_error_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        drawn(make_plan(), "png")
