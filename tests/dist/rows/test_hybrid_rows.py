"""Rows of hybrid models equal one unpadded sample at a time, run token by token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.rows.row_cases import ALL_CASES, HYBRID, TESTED
from tests.dist.rows.row_problem import KINDS
from tests.marks import needs_hybrid

pytestmark = [pytest.mark.dist, needs_hybrid]

# The others have their parts.
WEEKLY_CASES = {
    *("hybrid/hybrid_prefixes_pp2_vpp2-full", "hybrid/hybrid_split_cp2_pp2-full"),
    *("hybrid/gated_delta_split_family_moe", "hybrid/hybrid_split_wide_pp2_vpp2_full-gspo"),
}

Results = dict[str, dict[str, dict[str, Any]]]

CELLS = [(name, kind) for name in TESTED if name in HYBRID for kind in ALL_CASES[name].kinds]
EXACT = [(name, kind) for name, kind in CELLS if not ALL_CASES[name].mutation]
MUTATED = [cell for cell in CELLS if cell not in EXACT]


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_loss_gradients_and_outputs_equal_the_one_sample_reference(
    name: str, kind: str, results: Results
) -> None:
    result = results[name][kind]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)
    assert result["gradient_norm"] > 1e-3
    assert result["gradient_error"] < 1e-5
    if KINDS[kind].value_head:
        assert result["output_error"] < 1e-5
    else:
        assert result["logprob_max_error"] < 3e-5
    assert result["square_to_forward"] == 0
    assert not result.get("wrong_choices")


@pytest.mark.parametrize(("name", "kind"), MUTATED)
def test_what_a_mutated_case_forgets_is_seen(name: str, kind: str, results: Results) -> None:
    assert results[name][kind]["gradient_error"] > 3e-3
