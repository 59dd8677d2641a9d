"""Wrong calls are refused on every rank, before any rank could wait forever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.ranks.faults_worker import FAULTS
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist

MESSAGES = {
    "another_plan": "ranks [1] differ from the other 1 in plan",
    "another_cost_model": "differ from the other 1 in cost model",
    "missing_field": "rank 1: DataError: GRPO reads",
    "other_lengths": "rank 1: ",
    "other_layout": "DataError: the plan is for Layout(dp=2",
    "routing_of_a_dense_model": "the model has no experts",
    "wrong_groups": "the layout has dp=2, Megatron's process groups have 1",
    "another_head": "rank 1: ConfigError: the model has a vocabulary head",
    "other_tensors": "differ from the other 1 in tensor fields",
    "a_full_disk": "1 of 2 ranks failed: rank 1: OSError: [Errno 28] No space left on device",
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Per rank, the error of each fault."""
    folder: Path = tmp_path_factory.mktemp("faults")
    checked_job(2, "tests.dist.ranks.faults_worker", [str(folder)], timeout_s=120)
    return rank_reports(folder, 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_raises(fault: str, errors: list[dict[str, str]]) -> None:
    for rank in errors:
        assert MESSAGES[fault] in rank[fault]


def test_a_correct_step_runs_after_all_faults(errors: list[dict[str, str]]) -> None:
    assert [rank["nothing"] for rank in errors] == ["", ""]
