"""Rows over several DP ranks equal one unpadded sample at a time, and rows of one rank each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.rows.row_problem import KINDS
from tests.dist.rows.wide_cases import ALL_CASES, CASES
from tests.dist.rows.wide_problem import MIXTURES, wide_facts
from tests.dist.run_cases import run_wide_cases

pytestmark = pytest.mark.dist

Results = dict[str, dict[str, dict[str, Any]]]

EVERY = [(name, kind) for name in CASES for kind in ALL_CASES[name].kinds]
EXPERTS = [(name, kind) for name, kind in EVERY if "moe" in ALL_CASES[name].model_of(kind)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_wide_cases(CASES, tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize(("name", "kind"), EVERY)
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


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_outputs_equal_the_one_sample_reference(name: str, kind: str, results: Results) -> None:
    result = results[name][kind]
    if KINDS[kind].value_head:
        assert result["output_error"] < 1e-5
    else:
        assert result["num_logprobs"] > 10
        assert result["logprob_mean_error"] < 1e-5
        assert result["logprob_max_error"] < 3e-5
    # The forward pass has the bits of the training forward.
    assert result["square_to_forward"] == 0


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_loss_and_metrics_are_those_of_rows_of_one_rank(
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


@pytest.mark.parametrize(("name", "kind"), EXPERTS)
def test_experts_are_counted_recorded_and_replayed_as_in_the_reference(
    name: str, kind: str, results: Results
) -> None:
    result = results[name][kind]
    assert result["wrong_choices"] == 0
    assert result["replay_error"] < 1e-5
    if ALL_CASES[name].model == "moe_bias":
        assert result["num_biases"] > 4
        assert result["wrong_biases"] == 0


@pytest.mark.parametrize("name", ALL_CASES)
def test_plans_mix_widths(name: str) -> None:
    case = ALL_CASES[name]
    layout = case.layout
    for kind in case.kinds:
        samples = case.samples_of(kind)
        plan, plain = case.plans(samples)
        facts = wide_facts(samples, plan)
        assert wide_facts(samples, plain)["gpus"] == [layout.cp]
        gpus = [layout.cp * width for width in layout.widths]
        shared = [facts[f"shared_{width}"] for width in layout.widths]
        assert any(shared) == case.shares
        if case.is_planned:
            assert len(facts["gpus"]) > 1
            assert facts["gpus"][-1] == gpus[-1]
            continue
        assert facts["gpus"] == gpus
        least = MIXTURES[layout.dp]
        assert all(facts[fact] >= value for fact, value in least.items()), (facts, least)
        assert facts["short_in_wide"] > 0 or case.shape_of(kind) != "wide"
        assert all(shared) or not case.shares
