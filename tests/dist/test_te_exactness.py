"""Transformer Engine's layers, on stand-ins of their kernels, equal one unpadded sample at a time.

The references run without Transformer Engine. `tools/exactness.py --attention te` runs all cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.te_cases import GRIDS, refusal
from tests.te_python import VARIABLE, VERSION, needs_te

pytestmark = [pytest.mark.dist, needs_te]

# Each of the kernels, and each way to cut a row, is in at least one of these.
SAMPLE = {
    "layouts and models": [
        *("cp2", "tp2_sp_recompute", "pp2_vpp2", "pp2_other_model", "moe_dp2_ep2"),
        *("mla_cp2", "mla_tp2_sp", "mtp_pp2"),
    ],
    "shared prefixes": ["pp2-none"],
    "rows over several ranks": ["dp2-none"],
    "samples in pieces": ["single-full"],
    "Hugging Face folders": ["qwen3_moe-single"],
}
CELLS = [(grid, name) for grid, names in SAMPLE.items() for name in names]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The workers' results, by case; of rows those of the objective with the largest error."""
    found: dict[str, dict[str, Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, VERSION)
        for grid, names in SAMPLE.items():
            _, run = GRIDS[grid]
            folder: Path = tmp_path_factory.mktemp("te")
            for name, result in run(names, folder).items():
                runs = [result] if "gradient_error" in result else list(result.values())
                found[name] = max(runs, key=lambda run: run["gradient_error"])
    return found


@pytest.mark.parametrize(("grid", "name"), CELLS)
def test_gradients_equal_the_one_sample_reference(
    grid: str, name: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[name]
    assert result["gradient_error"] < 1e-5
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)
    assert result.get("num_logprobs", result.get("num_tokens")) > 10
    assert result.get("logprob_max_error", result.get("logprobs_max_error")) < 3e-5


@pytest.mark.parametrize(("grid", "name"), CELLS)
def test_the_cases_are_none_that_are_refused(grid: str, name: str) -> None:
    assert name in GRIDS[grid][0]
    assert not refusal(grid, name)
