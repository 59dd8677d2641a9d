"""Gradients, losses and outputs of hybrid models equal the one-sample reference on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.exactness.cases import HYBRID_CASES
from tests.dist.run_cases import run_cases
from tests.marks import needs_hybrid, needs_te
from tests.te_python import VARIABLE, VERSION

pytestmark = [pytest.mark.dist, needs_hybrid]

# Each way to divide a model, chunks without layers, recompute, experts; `tools/exactness.py` runs
# all.
CASES = (
    *("hybrid_tp2", "hybrid_cp4", "hybrid_pp2_vpp2_ends_alone_recompute"),
    *("gated_delta_dp2_tp2_sp_ep2", "mamba_cp2_pp2_vpp2_recompute"),
    *("mtp_hybrid_cp2_pp2_vpp2", "mamba_latent_tp2_sp_ep2", "dsa_as_hybrid_tp2_sp"),
)
WEEKLY_CASES = {
    *("hybrid_tp2", "hybrid_cp4", "hybrid_pp2_vpp2_ends_alone_recompute", "dsa_as_hybrid_tp2_sp"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_the_one_sample_reference(
    name: str, case_results: dict[str, dict[str, Any]]
) -> None:
    result = case_results[name]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)
    assert result["gradient_norm"] > 1e-3
    assert result["gradient_error"] < 1e-5
    assert result["num_logprobs"] > 10
    assert result["logprob_max_error"] < 3e-5
    facts = result["facts"]
    expect = HYBRID_CASES[name].expect
    assert {key: facts[key] for key in expect} == expect
    loss = result["expected_metrics"].get("indexer_loss", 0.0)
    assert result["metrics"].get("indexer_loss", 0.0) == pytest.approx(loss, rel=1e-5)


@pytest.mark.weekly
@needs_te
def test_transformer_engines_layers_equal_the_reference(
    reference: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, VERSION)
    names = ["hybrid_tp2", "mtp_hybrid_pp2", "mamba_latent_tp2_sp_ep2"]
    results = run_cases(names, reference, tmp_path_factory.mktemp("te"))
    for name in names:
        assert results[name]["gradient_error"] < 1e-5, name
        assert results[name]["logprob_max_error"] < 3e-5, name


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("hybrid", "dsa"))])
def test_experts_are_counted_and_replayed(
    name: str, case_results: dict[str, dict[str, Any]]
) -> None:
    result = case_results[name]
    assert result["wrong_choices"] == 0
    assert result["replay_error"] < 1e-5
    assert result["auxiliary_share"] > 0.01
    # The reference's mean is over the model's layers alone; those of MTP have experts too.
    pattern = HYBRID_CASES[name].model.hybrid_layer_pattern or ""
    share = pattern.split("/")[0].count("E") / pattern.count("E")
    balance = result["expected_metrics"]["moe_balance_loss"] * share
    assert result["metrics"]["moe_balance_loss"] == pytest.approx(balance, rel=1e-5)
    assert not result["wrong_biases"]
