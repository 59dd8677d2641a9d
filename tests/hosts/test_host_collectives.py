"""Hosts whose ranks plan their own samples: all ranks get the same M, or all raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The outcome of each case, for each rank."""
    folder: Path = tmp_path_factory.mktemp("collectives")
    checked_job(2, "tests.hosts.collective_worker", [str(folder)], timeout_s=240)
    return rank_reports(folder, 2)


Ranks = list[dict[str, Any]]


def rows(found: Ranks, case: str, rank: int) -> list[list[int]]:
    value = found[rank][case]
    assert isinstance(value, dict), value
    return value["rows"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("case", "count"), [("one_count", 6), ("one_count_in_fours", 8)])
def test_all_ranks_run_the_same_count(found: Ranks, case: str, count: int) -> None:
    for rank, num_samples in enumerate([6 if count == 6 else 10, 9]):
        mine = rows(found, case, rank)
        assert len(mine) == count
        assert sorted(i for row in mine for i in row) == list(range(num_samples))


def test_a_light_rank_pads_with_copies_without_a_loss(found: Ranks) -> None:
    assert len(rows(found, "a_light_rank_pads", 0)) == 6
    mine = rows(found, "a_light_rank_pads", 1)
    assert sorted(mine[:4]) == [[0], [1], [2], [3]]
    assert mine[4:] == [[1], [1]]
    assert sum(found[1]["a_light_rank_pads"]["loss_tokens"]) == 8 + 7 + 9 + 8
    assert found[1]["a_light_rank_pads"]["loss_tokens"][4:] == [0, 0]


def test_ranks_without_a_common_count_use_their_own(found: Ranks) -> None:
    assert [len(rows(found, "each_by_itself", rank)) for rank in range(2)] == [3, 2]


REFUSED = {
    "a_light_rank": "HostAssertionError: 6 micro-batches",
    "no_samples": "ScheduleError: 1 of 2 ranks failed: rank 1: DataError: a rank has no samples",
    "another_budget": "differ from the other 1 in batching options",
    "another_native_layout": "differ from the other 1 in batching options",
    "no_budget": "ScheduleError: 1 of 2 ranks failed: rank 1: TypeError",
    "skyrl_no_samples": "rank 1: DataError: a rank has no samples",
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_ranks_raise(found: Ranks, case: str) -> None:
    for rank in found:
        assert REFUSED[case] in rank[case]


def test_skyrl_splits_before_it_pads(found: Ranks) -> None:
    heavy, light = (rank["skyrl_one_count"] for rank in found)
    assert (heavy["padding"], len(heavy["loss_tokens"])) == (0, 6)
    # Four samples fill four micro-batches; the other two are padding.
    assert (light["padding"], light["loss_tokens"]) == (2, [8, 8, 8, 8, 0, 0])


def test_skyrl_counts_are_legal_for_the_pipeline(found: Ranks) -> None:
    # With G=4, five micro-batches leave a last turn of 1; pp=2 needs 2 or more.
    heavy, light = (rank["skyrl_with_a_layout"] for rank in found)
    assert (heavy["padding"], len(heavy["loss_tokens"])) == (1, 6)
    assert (light["padding"], len(light["loss_tokens"])) == (2, 6)


def test_every_case_was_run(found: Ranks) -> None:
    assert list(found[0]) == list(found[1])
    assert len(found[0]) == 12
