"""Gradients, losses and log-probs equal those of one unpadded sample at a time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import problem
from tests.dist.exactness.cases import CASES
from tests.dist.problem import PRECISE

pytestmark = pytest.mark.dist

Results = dict[str, dict[str, Any]]


# Layouts whose parts other cases have too.
WEEKLY_CASES = {
    *("pp2_uniform", "pp2_vpp2_deallocating", "pp2_embedding_alone_frozen", "pp4_vpp2"),
    *("moe_shared_dp2_ep2", "moe_tp2_sp_etp2", "moe_tp2_sp_pp2_vpp2_ep2"),
    *("mla_cp2", "dsa_tp2_sp_recompute", "dsa_cp2_recompute"),
    *("mtp_cp2", "mtp_pp2_vpp2_uneven_untied"),
    *("shapes_tp2_sp", "shapes_mla_cp2", "shapes_mtp_pp2", "shapes_moe_dp2_ep2"),
    *("moe_bias_cp2_recompute", "moe_dp2_pp2_vpp2_ep2_uneven", "moe", "mtp", "shapes_pp2_vpp2"),
    *("pp2_vpp2_embedding_alone_recompute", "moe_shared_pp2_vpp2_uneven"),
    *("moe_cp2_pp2_vpp2", "pp2", "dp2_pp2_vpp2"),
}
EXACT = [name for name, case in CASES.items() if case.variant not in PRECISE]
ROUNDED = [name for name in CASES if name not in EXACT]


@pytest.mark.parametrize("name", EXACT)
def test_gradients_equal_the_one_sample_reference(name: str, case_results: Results) -> None:
    result = case_results[name]
    assert result["gradient_norm"] > 1e-3
    assert result["gradient_error"] < 1e-5
    # A single small parameter may lose one more digit to fp32 sums than the whole gradient does.
    assert result["worst_parameter"] < 1e-4


@pytest.mark.parametrize("name", EXACT)
def test_the_loss_equals_the_one_sample_reference(name: str, case_results: Results) -> None:
    result = case_results[name]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)


@pytest.mark.parametrize("name", EXACT)
def test_logprobs_equal_the_one_sample_reference(name: str, case_results: Results) -> None:
    result = case_results[name]
    assert result["num_logprobs"] > 10
    assert result["logprob_mean_error"] < 1e-5
    assert result["logprob_max_error"] < 3e-5


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.expect])
def test_a_case_is_what_its_name_says(name: str, case_results: Results) -> None:
    facts = case_results[name]["facts"]
    assert {key: facts[key] for key in CASES[name].expect} == CASES[name].expect


@pytest.mark.parametrize("name", ROUNDED)
def test_packing_adds_little_to_the_error_of_bf16(name: str, case_results: Results) -> None:
    """One sample at a time in bf16 is already far from fp32; packed rows are about as far."""
    result = case_results[name]
    assert 0 < result["gradient_error"] < 2 * result["one_sample_gradient_error"]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-2)
    assert result["logprob_mean_error"] < 0.02


BIASED = [name for name, (model, _) in problem.MODELS.items() if model.has_expert_bias]

# A forward pass over the plan's own rows equals the training step's forward, so the first ratios
# are 1. Not with an expert bias: a step changes it, so the second step has another model.
SAME_ROWS = [
    name
    for name, case in CASES.items()
    if case.forward_budget is None and case.variant not in BIASED
]


@pytest.mark.parametrize("name", SAME_ROWS)
def test_old_logprobs_of_the_same_rows_are_equal_bit_by_bit(
    name: str, case_results: Results
) -> None:
    assert case_results[name]["square_to_forward"] == 0


@pytest.mark.parametrize("name", ["pp2_vpp2_forward_plan"])
def test_old_logprobs_of_other_rows_are_close(name: str, case_results: Results) -> None:
    assert case_results[name]["square_to_forward"] < 1e-10


MOE = [name for name, case in CASES.items() if case.variant.startswith("moe")]


@pytest.mark.parametrize("name", MOE)
def test_auxiliary_losses_equal_the_one_sample_reference(name: str, case_results: Results) -> None:
    result = case_results[name]
    # The first test compares their part of the gradient; here it must not be negligibly small.
    assert result["auxiliary_share"] > 0.1
    assert result["metrics"]["moe_balance_loss"] == pytest.approx(
        result["expected_metrics"]["moe_balance_loss"], rel=1e-5
    )
    if CASES[name].variant == "moe":
        z_loss = result["expected_metrics"]["moe_z_loss"]
        assert result["metrics"]["moe_z_loss"] == pytest.approx(z_loss, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].variant == "dsa"])
def test_the_loss_of_indexers_equals_the_one_sample_reference(
    name: str, case_results: Results
) -> None:
    result = case_results[name]
    assert result["auxiliary_share"] > 0.1
    expected = result["expected_metrics"]["indexer_loss"]
    assert expected > 0.1
    assert result["metrics"]["indexer_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in MOE if CASES[name].variant in BIASED])
def test_the_expert_bias_follows_real_tokens_only(name: str, case_results: Results) -> None:
    assert case_results[name]["num_biases"] > 0
    assert case_results[name]["wrong_biases"] == 0


@pytest.mark.parametrize("name", MOE)
def test_recorded_experts_are_replayed_in_another_plan(name: str, case_results: Results) -> None:
    result = case_results[name]
    assert result["wrong_choices"] == 0
    assert result["replay_error"] < 1e-5


def test_replay_uses_a_different_plan(case_results: Results) -> None:
    differ = [case_results[name]["plans_differ"] for name in MOE if name in case_results]
    assert sum(differ) > len(differ) / 2


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "mtp" in case.variant])
def test_multi_token_losses_equal_the_reference(name: str, case_results: Results) -> None:
    result = case_results[name]
    assert len(result["expected_mtp"]) > 0
    for depth, loss in result["expected_mtp"].items():
        assert loss > 0.1
        assert result["metrics"][depth] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    "name", ["pp2", "pp2_vpp2", "pp4_vpp2", "dp2_pp2_vpp2", "moe_cp2_pp2_vpp2"]
)
def test_rows_are_packed_and_differ_in_length(name: str, case_results: Results) -> None:
    facts = case_results[name]["facts"]
    assert facts["packed"]
    assert facts["row_lengths"] > 1, "the case does not exercise planned shapes"


def test_metrics_do_not_depend_on_packing_or_layout(case_results: Results) -> None:
    comparable = [
        name
        for name, case in CASES.items()
        if name in case_results
        and (case.weighting, case.variant) == ("token-mean", "plain")
        and case.num_samples == CASES["single"].num_samples
    ]
    first = case_results[comparable[0]]["metrics"]
    assert {"ratio", "clip_fraction", "kl_old", "kl_ref", "entropy"} <= set(first)
    assert len(comparable) > 5
    for name in comparable:
        assert case_results[name]["metrics"] == pytest.approx(first, rel=1e-5), name
