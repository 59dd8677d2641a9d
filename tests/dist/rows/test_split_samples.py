"""Samples in pieces equal one unpadded sample at a time, and rows of whole samples."""

from __future__ import annotations

from typing import Any

import pytest

from megapack.layout import Layout
from tests.dist.rows.row_problem import KINDS
from tests.dist.rows.split_cases import ALL_CASES, CASES, MUTATED
from tests.dist.rows.split_problem import split_facts
from tests.dist.run_cases import run_split_cases

pytestmark = pytest.mark.dist

Results = dict[str, dict[str, dict[str, Any]]]

EVERY = [(name, kind) for name in CASES if name not in MUTATED for kind in ALL_CASES[name].kinds]
EXPERTS = [(name, kind) for name, kind in EVERY if "moe" in ALL_CASES[name].model_of(kind)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_split_cases(CASES, tmp_path_factory.mktemp("split"))


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_loss_and_gradients_equal_the_one_sample_reference(
    name: str, kind: str, results: Results
) -> None:
    result = results[name][kind]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)
    assert result["gradient_norm"] > 1e-3
    assert result["gradient_error"] < 1e-5
    assert result["worst_parameter"] < 3e-5


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
def test_loss_and_metrics_are_those_of_whole_samples(
    name: str, kind: str, results: Results
) -> None:
    result = results[name][kind]
    assert result["loss"] == pytest.approx(result["plain_loss"], rel=1e-5)
    assert result["metrics"] == pytest.approx(result["plain_metrics"], rel=1e-4, abs=1e-6)
    for metric, value in result["expected_metrics"].items():
        assert result["metrics"][metric] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(("name", "kind"), EXPERTS)
def test_experts_are_recorded_and_replayed_as_in_the_reference(
    name: str, kind: str, results: Results
) -> None:
    result = results[name][kind]
    assert result["wrong_choices"] == 0
    assert result["replay_error"] < 1e-5


@pytest.mark.parametrize("name", MUTATED)
def test_a_forgotten_gradient_or_piece_is_seen(name: str, results: Results) -> None:
    assert results[name]["sft"]["gradient_error"] > 1e-2


@pytest.mark.parametrize("name", ALL_CASES)
def test_plans_have_chains_and_hold_few_tokens(name: str) -> None:
    case = ALL_CASES[name]
    layout = case.layout
    samples = case.samples_of(case.kinds[0])
    plan, plain = case.plans(samples)
    facts = split_facts(plan)
    assert sorted(length for rank in facts["chains"] for length in rank) == [2, 3]
    assert facts["pieces"] == 5
    assert facts["longest_row"] < max(samples.batch.lengths)
    # A stage holds the longest chain, and what runs ahead of the backwards.
    window = 3 + (layout.pp - 1 if layout.vpp == 1 else 2 * (layout.pp - 1) + layout.vpp * 4)
    assert facts["peak_live_tokens"] <= window * facts["longest_row"]
    assert not split_facts(plain)["pieces"]


def test_a_deep_pipeline_holds_fewer_tokens_than_with_whole_samples() -> None:
    case = ALL_CASES["pp4-none"]
    assert case.layout == Layout(pp=4)
    plan, plain = case.plans(case.samples_of("sft"))
    assert split_facts(plan)["peak_live_tokens"] < split_facts(plain)["peak_live_tokens"]
