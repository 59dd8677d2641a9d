"""Process groups: few calls, the same ones on every rank, and none before a plan needs them."""

from __future__ import annotations

from typing import Any

import pytest

from megapack.schedule.channels import link_sets
from tests.dist.ranks.groups_worker import PIPELINES
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", params=[pytest.param(3, marks=pytest.mark.weekly), 4])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank of a job of three and of four ranks found."""
    folder = tmp_path_factory.mktemp("groups")
    checked_job(request.param, "tests.dist.ranks.groups_worker", [str(folder)], timeout_s=120)
    return rank_reports(folder, request.param)


def test_a_pipeline_asks_for_two_groups_per_set_of_links_at_any_number_of_pipelines(
    job: Any,
) -> None:
    expected = {
        name: 2 * len(link_sets(layout.pp, wraps=layout.vpp > 1))
        for name, layout in PIPELINES.items()
    }
    assert expected == {"pp2": 2, "pp2_vpp2": 4, "pp4": 4, "pp4_vpp2": 4}
    expected |= {"pp3_vpp2": 6}
    for rank in job:
        found = {name: case for name, case in rank.items() if "rows" not in name}
        assert {name: len(case["asked"]) for name, case in found.items()} == {
            name: expected[name] for name in found
        }
        assert all(ranks is None for case in found.values() for ranks in case["asked"])
        assert all(case["again"] == 0 for case in found.values())


def test_links_of_several_pipelines_in_one_group_do_not_mix(job: Any) -> None:
    for rank in job:
        for name, case in rank.items():
            if "rows" not in name:
                for received, sender in (case["activations"], case["gradients"]):
                    assert received == sender


def test_every_rank_asks_for_the_same_row_groups_in_the_same_order(job: Any) -> None:
    for name in {name for name in job[0] if "rows" in name}:
        asked = [[step["asked"] for step in rank[name]] for rank in job]
        assert asked[1:] == asked[:-1]


def test_row_groups_are_made_for_the_widths_that_steps_use_and_once(job: Any) -> None:
    pairs = [[0, 1], [2, 3]] if len(job) == 4 else [[0, 1]]
    fours = [[0, 1, 2, 3]] if len(job) == 4 else []
    asked = [step["asked"] for step in job[0]["rows"]]
    assert asked == [[], pairs, [], fours, []]
    if len(job) == 4:
        assert [s["asked"] for s in job[0]["rows_of_stages"]] == [[], [[0, 1], [2, 3]], [], [], []]


def test_a_rank_beside_the_blocks_has_no_row_group(job: Any) -> None:
    sizes = [rank["rows"][-1]["sizes"] for rank in job]
    if len(job) == 3:
        assert sizes == [{"1": 1, "2": 2}, {"1": 1, "2": 2}, {"1": 1, "2": None}]
    else:
        assert sizes == [{"1": 1, "2": 2, "4": 4}] * 4
