"""Rows of models with hyper-connections equal one unpadded sample at a time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.rows.row_cases import ALL_CASES, STREAMS
from tests.marks import needs_streams

pytestmark = [pytest.mark.dist, needs_streams]

CELLS = [(name, kind) for name in STREAMS for kind in ALL_CASES[name].kinds]


@pytest.mark.parametrize(("name", "kind"), CELLS)
def test_loss_gradients_and_outputs_equal_the_one_sample_reference(
    name: str, kind: str, results: dict[str, dict[str, dict[str, Any]]]
) -> None:
    result = results[name][kind]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)
    assert result["gradient_norm"] > 1e-3
    assert result["gradient_error"] < 1e-5
    assert result["worst_parameter"] < 1e-4
    assert result["logprob_max_error"] < 3e-5
    assert result["square_to_forward"] == 0
