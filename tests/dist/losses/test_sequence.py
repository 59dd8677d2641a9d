"""Value heads train in fp32; objectives at log-probs that are far apart.

Gradients of the objectives are compared with one sample at a time in `tests/dist/rows`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.losses.sequence_problem import SPOT
from tests.dist.spawn import checked_job, rank_reports

pytestmark = pytest.mark.dist

Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the first of two ranks found."""
    folder = tmp_path_factory.mktemp("sequence")
    checked_job(2, "tests.dist.losses.sequence_worker", [str(folder)], timeout_s=300)
    return dict(rank_reports(folder, 2)[0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_value_head_is_trained_in_fp32_and_saved(dtype: str, results: Results) -> None:
    plain, split = (results[f"{dtype} {split}"] for split in (False, True))
    for result in (plain, split):
        assert result["dtype"] == "torch.float32"
        assert result["in_checkpoint"]
        assert result["losses"][-1] < 0.8 * result["losses"][0]
    near = {"fp32": 1e-4, "bf16": 2e-2}[dtype]
    assert split["losses"] == pytest.approx(plain["losses"], rel=near)
    assert plain["losses"] == pytest.approx(results["fp32 False"]["losses"], rel=0.05)


def test_a_value_head_on_tied_embeddings_is_refused(results: Results) -> None:
    assert "untie_embeddings=true" in results["tied"]


def test_log_probs_that_are_far_apart(results: Results) -> None:
    """On two context-parallel ranks. The token is named where its loss has no value."""
    found = results["extremes"]
    for name in ("clipped", "without advantage", "dual clip"):
        near, far, difference = found[name]
        assert far == near
        assert difference == 0
    sample, token = SPOT
    place = f"token {token} of sample {sample} (from 0, prompt included; id {found['id']}) has loss"
    for name, far in (("unbounded", "old_logprobs -20"), ("reference", "ref_logprobs 19")):
        assert f"{place} inf, log-prob -" in found[name]
        assert far in found[name]
