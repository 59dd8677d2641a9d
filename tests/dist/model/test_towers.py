"""A tower beside a decoder under one optimizer: weights and norms are those of plain torch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.model.towers_worker import CASES
from tests.dist.spawn import checked_job, rank_reports
from tests.toy_towers import write_image_model

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found in all cases."""
    folder = tmp_path_factory.mktemp("towers")
    write_image_model(folder / "model")
    (folder / "out").mkdir()
    args = [str(folder / "out"), str(folder / "model"), *CASES, "unmatched"]
    checked_job(2, "tests.dist.model.towers_worker", args, timeout_s=300)
    return rank_reports(folder / "out", 2)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_plain_torch(name: str, reports: list[dict[str, Any]]) -> None:
    for report in (one[name] for one in reports):
        for norm, expected in report["norms"]:
            assert norm == pytest.approx(expected, rel=1e-6)
        # bf16 rounds by up to 1/256.
        assert report["error"] < (4e-3 if "bf16" in name else 1e-6)
        assert report["same"]


@pytest.mark.parametrize("name", CASES)
def test_what_is_frozen_stays(name: str, reports: list[dict[str, Any]]) -> None:
    for report in (one[name] for one in reports):
        tower = [own for own in report["trained"] if own.startswith("visual.")]
        assert report["changed"] == [own for own in report["changed"] if own in tower]
        assert (tower == []) is (name == "frozen")
        if name == "mergers_only":
            assert {own.split(".")[1] for own in tower} == {"merger", "deepstack_merger_list"}
        else:
            assert len(tower) in (0, 69)
        has_decoder = len(report["trained"]) > len(tower)
        assert has_decoder is not name.endswith("_only")
        assert len(report["changed"]) == len(tower)


@pytest.mark.parametrize("name", CASES)
def test_rotary_frequencies_are_whole(name: str, reports: list[dict[str, Any]]) -> None:
    for report in (one[name] for one in reports):
        assert report["rotary"]
        assert report["dtypes"] == ["torch.bfloat16" if "bf16" in name else "torch.float32"]


def test_a_glob_that_matches_nothing_is_refused_on_all_ranks(
    reports: list[dict[str, Any]],
) -> None:
    for report in reports:
        assert "no parameter matches 'visual.mergers.*'" in report["unmatched"]
