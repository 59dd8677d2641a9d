"""Models with hyper-connections: a step equals one unpadded sample at a time on any layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.exactness.cases import STREAMS_CASES as CASES
from tests.marks import needs_streams

pytestmark = [pytest.mark.dist, needs_streams]


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_the_one_sample_reference(
    name: str, case_results: dict[str, dict[str, Any]]
) -> None:
    result = case_results[name]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)
    assert result["gradient_norm"] > 1e-3
    assert result["gradient_error"] < 1e-5
    assert result["worst_parameter"] < 1e-4
    assert result["num_logprobs"] > 10
    assert result["logprob_max_error"] < 3e-5
    assert result["square_to_forward"] == 0
    facts = result["facts"]
    expect = CASES[name].expect
    assert {key: facts[key] for key in expect} == expect
