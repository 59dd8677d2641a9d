"""Rows with shared prefixes equal one unpadded sample at a time, and rows without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.rows.prefix_cases import ALL_CASES, CASES
from tests.dist.rows.prefix_problem import SHARING, sharing_facts
from tests.dist.rows.row_problem import KINDS, PRECISE
from tests.dist.run_cases import run_prefix_cases

pytestmark = pytest.mark.dist

Results = dict[str, dict[str, dict[str, Any]]]

EVERY = [(name, kind) for name in CASES for kind in ALL_CASES[name].kinds]
EXACT = [(name, kind) for name, kind in EVERY if ALL_CASES[name].model not in PRECISE]
ROUNDED = [cell for cell in EVERY if cell not in EXACT]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_prefix_cases(CASES, tmp_path_factory.mktemp("prefixes"))


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_loss_and_gradients_equal_the_one_sample_reference(
    name: str, kind: str, results: Results
) -> None:
    result = results[name][kind]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)
    assert result["gradient_norm"] > 1e-3
    assert result["gradient_error"] < 1e-5
    # Margins of rewards do not depend on the last norm's bias. Its gradient is 0, so a relative
    # error means nothing.
    assert kind == "reward" or result["worst_parameter"] < 3e-5


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_outputs_equal_the_one_sample_reference(name: str, kind: str, results: Results) -> None:
    result = results[name][kind]
    if KINDS[kind].value_head:
        assert result["output_error"] < 1e-5
    else:
        assert result["num_logprobs"] > 10
        assert result["logprob_mean_error"] < 1e-5
        assert result["logprob_max_error"] < 3e-5


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_forward_outputs_of_the_plan_are_those_of_training_bit_by_bit(
    name: str, kind: str, results: Results
) -> None:
    assert results[name][kind]["square_to_forward"] == 0


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_loss_and_metrics_are_those_of_the_plan_without_sharing(
    name: str, kind: str, results: Results
) -> None:
    result = results[name][kind]
    assert result["loss"] == pytest.approx(result["plain_loss"], rel=1e-5)
    # SFT on a dense model without multi-token prediction has none.
    assert result["metrics"] or kind.startswith("sft")
    # DPO's margins are sums over responses, of about 20 log-probs.
    assert result["metrics"] == pytest.approx(result["plain_metrics"], rel=1e-4, abs=1e-6)
    for metric, value in result["expected_metrics"].items():
        assert value > 0.01
        assert result["metrics"][metric] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(("name", "kind"), ROUNDED)
def test_sharing_adds_little_to_the_error_of_bf16(name: str, kind: str, results: Results) -> None:
    result = results[name][kind]
    assert 0 < result["gradient_error"] < 2 * result["one_sample_gradient_error"]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-2)
    assert result["logprob_mean_error"] < 0.02


@pytest.mark.parametrize("name", ALL_CASES)
def test_rows_share_what_the_case_is_about(name: str) -> None:
    case = ALL_CASES[name]
    for kind in case.kinds:
        samples = case.samples_of(kind)
        shape = samples.shape
        facts = sharing_facts(samples, case.plan(samples, shared=True))
        least = {"shared_tokens": 0 if shape == "g1" else 9, **SHARING[shape], **case.expect}
        assert all(facts[fact] >= value for fact, value in least.items()), (facts, least)
        assert sharing_facts(samples, case.plan(samples, shared=False))["shared_tokens"] == 0
