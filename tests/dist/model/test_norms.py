"""Megatron's optimizers find the gradient norm of one process, on each rank of any layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist

# Optimizers without shards, and the other layouts, are among the cells of `exactness`.
CASES = ("gpt_oss/tp2_sp_ep2", "moe/tp2_sp_etp2", "dsa/tp2_sp", "mtp_moe/tp2_sp")

Reports = list[dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Reports]:
    """By number of ranks: what each of them found."""
    found: dict[int, Any] = {}
    singles = dict.fromkeys(f"{case.partition('/')[0]}/single" for case in CASES)
    for world, cases in (1, singles), (2, CASES):
        folder = tmp_path_factory.mktemp("norms")
        args = [str(folder), *cases]
        checked_job(world, "tests.dist.model.norms_worker", args, timeout_s=300, te="")
        found[world] = rank_reports(folder, world)
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_the_norm_of_one_process(case: str, reports: dict[int, Reports]) -> None:
    want = reports[1][0][f"{case.partition('/')[0]}/single"]["distributed"]
    for rank in reports[2]:
        assert rank[case] == pytest.approx(dict.fromkeys(rank[case], want), rel=1e-5)
