"""Experts on shared prefixes give what they give on rows that share nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist


def test_a_step_with_experts_and_mtp_equals_the_unshared_step(tmp_path: Path) -> None:
    checked_job(2, "tests.dist.model.shared_experts_worker", [str(tmp_path)], timeout_s=250)
    of_ranks = rank_reports(tmp_path, 2)
    for case in of_ranks[0]:
        refusals = {rank[case]["refusal"] for rank in of_ranks}
        assert len(refusals) == 1, "each rank names the samples"
        message = r"samples \d+ and \d+ share \d+ tokens, and their routing differs at token 2; "
        assert re.search("DataError: .*" + message, refusals.pop())
        for rank in of_ranks:
            found = rank[case]
            assert min(found["saved"]) > 10
            assert found["recorded_alike"]
            assert found["gradient_norm"] > 1e-2
            assert found["biases_moved"] > 0
            assert found["metrics"]["moe_balance_loss"] > 0
            assert found["metrics"]["moe_z_loss"] > 0
            assert found["turned_differs"] > 0.01, "the routers would have chosen these experts"
            assert found["turned_error"] < 1e-5
            for name in ("free", "replayed"):
                assert found[name]["metrics"] == pytest.approx(found["metrics"], rel=1e-5)
                assert found[name]["gradient_error"] < 1e-5
                assert found[name]["biases_alike"]
