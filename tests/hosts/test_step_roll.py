"""ROLL's own actor worker with the patches: the same training, planned rows and shapes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.hosts.steps.job import Report, Runs
from tests.hosts.steps.roll import LENGTHS

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

PATCHES = "roll"
BUDGETS = {"packed": 96, "packed_tight": 72, "padded": 128}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs("roll", tmp_path_factory.mktemp("roll"))


def losses(reports: list[Report]) -> list[float]:
    """The loss of all ranks; ROLL divides each rank's by the samples of all of them."""
    return np.sum([report.losses for report in reports if report.losses], axis=0).tolist()


def logprobs(reports: list[Report]) -> np.ndarray:
    """Of all samples, in order; each is on one rank."""
    return np.sum([report.logprobs for report in reports if report.logprobs], axis=0)


CASES = [("packed", "dp=2"), ("packed", "pp=2,vpp=2"), ("padded", "pp=2"), ("padded", "pp=2,vpp=2")]


@pytest.mark.parametrize(("case", "layout"), CASES)
def test_training_and_log_probs_are_those_of_one_rank_without_patches(
    run: Runs, case: str, layout: str
) -> None:
    alone = run("dp=1", "", case)
    patched = run(layout, PATCHES, case)
    assert losses(patched) == pytest.approx(losses(alone), rel=1e-5)
    # Step 2 is 0 if the first step did not train, and equal to step 1 if weights did not change.
    assert losses(alone)[0] != pytest.approx(losses(alone)[1], rel=0.1)
    np.testing.assert_allclose(logprobs(patched), logprobs(alone), atol=2e-5)
    for report in patched:
        assert report.grad_norms == pytest.approx(alone[0].grad_norms, rel=1e-5)
        assert "roll.utils.dynamic_batching.dynamic_batching_shard" in report.patched


@pytest.mark.parametrize(("case", "layout"), CASES)
def test_rows_are_planned_and_their_shapes_are_not_exchanged(
    run: Runs, case: str, layout: str
) -> None:
    reports = run(layout, PATCHES, case)
    assert sum(report.num_shape_exchanges for report in reports) == 0
    for report in reports:
        for rows in [*report.row_tokens, *report.more["forward_rows"]]:
            assert max(rows) <= BUDGETS[case]
            assert layout != "pp=2,vpp=2" or len(rows) % 2 == 0
    assert len({len(rows) for report in reports for rows in report.row_tokens}) == 1


def test_roll_alone_exchanges_shapes(run: Runs) -> None:
    reports = run("pp=2", "", "packed")
    assert min(report.num_shape_exchanges for report in reports) > 0
    assert losses(reports) == pytest.approx(losses(run("dp=1", "", "packed")), rel=1e-5)


def test_roll_alone_goes_over_its_budget(run: Runs) -> None:
    without = run("dp=1", "", "packed_tight")[0]
    patched = run("dp=1", "roll", "packed_tight")[0]
    budget = BUDGETS["packed_tight"]
    assert max(max(rows) for rows in without.row_tokens) > budget
    assert max(max(rows) for rows in patched.row_tokens) <= budget
    assert patched.losses == pytest.approx(without.losses, rel=1e-5)


def test_padded_micro_batches_have_less_padding(
    run: Runs,
) -> None:
    without = run("dp=1", "", "padded_tight")[0]
    patched = run("dp=1", "roll", "padded_tight")[0]
    assert patched.num_microbatches == without.num_microbatches
    assert patched.losses == pytest.approx(without.losses, rel=1e-5)
    assert sum(LENGTHS) <= sum(patched.row_tokens[0]) < sum(without.row_tokens[0])


@pytest.mark.parametrize("layout", ["dp=1", "pp=2,vpp=2"])
def test_shared_prefixes_change_no_number(run: Runs, layout: str) -> None:
    alone = run("dp=1", "", "packed_prompts")
    shared = run(layout, PATCHES, "packed_prompts_shared")
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-5)
    np.testing.assert_allclose(logprobs(shared), logprobs(alone), atol=2e-5)
    for report in shared:
        assert report.grad_norms == pytest.approx(alone[0].grad_norms, rel=1e-5)
    # The toy's own forward sees the shorter row.
    tokens = sum(alone[0].row_tokens[0])
    assert 0.5 * tokens < sum(shared[0].row_tokens[0]) < 0.97 * tokens
