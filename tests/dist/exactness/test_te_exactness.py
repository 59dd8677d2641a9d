"""Transformer Engine's layers, on stand-ins of their kernels, equal one unpadded sample at a time.

The references run without Transformer Engine. `tools/exactness.py --attention te` runs all cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.exactness.te_cases import GRIDS, refusal
from tests.dist.hf.hf_cases import HF_CASES
from tests.dist.run_cases import run_cases, selected_names
from tests.marks import needs_te
from tests.te_python import VARIABLE, VERSION

pytestmark = [pytest.mark.dist, needs_te]

# Fused attention, its ring, sequence parallelism, grouped experts with fused permutation, latent
# attention with whole projections; rows that share prefixes or samples, and rows of one and of two
# ranks in turn. Layers with windows,
# sinks and caps, and rows with more keys than queries over ranks, run in our attention.
SAMPLE = {
    "layouts and models": ["cp2", "moe_dp2_ep2", "mla_tp2_sp"],
    "shared prefixes": ["prefixes/window_cp2"],
    "rows over several ranks": ["wide/dp2-none"],
    "samples in pieces": ["split/family_selective", "split/local_cp2"],
    "Hugging Face folders": [
        f"{family}-{layout}"
        for family in ("gpt_oss", "gemma2")
        for layout in ("tp2_sp", "pp2_vpp2")
    ],
}
WEEKLY_CASES = {
    *("mla_tp2_sp", "split/local_cp2", "split/family_selective"),
    *SAMPLE["Hugging Face folders"],
}
CELLS = [(grid, name) for grid, names in SAMPLE.items() for name in names]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The workers' results, by case of the selected tests; of rows those of the objective with the
    largest error."""
    wanted = selected_names(request)
    found: dict[str, dict[str, Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, VERSION)
        for grid, every in SAMPLE.items():
            names = [name for name in every if name in wanted]
            if not names:
                continue
            folder = tmp_path_factory.mktemp("te")
            if grid == "layouts and models":
                found |= run_cases(names, reference, folder)
                continue
            _, run = GRIDS[grid]
            for name, result in run(names, folder).items():
                if name in HF_CASES:
                    own = {"logprob_max_error": result["logprobs_max_error"]}
                    found[name] = {**result, **own, "num_logprobs": result["num_tokens"]}
                else:
                    found[name] = max(result.values(), key=lambda run: run["gradient_error"])
    return found


@pytest.mark.parametrize(("grid", "name"), CELLS)
def test_gradients_equal_the_one_sample_reference(
    grid: str, name: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[name]
    assert result["gradient_error"] < 1e-5
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)
    assert result["num_logprobs"] > 10
    assert result["logprob_max_error"] < 3e-5


@pytest.mark.parametrize(("grid", "name"), CELLS)
def test_the_cases_are_none_that_are_refused(grid: str, name: str) -> None:
    assert name in GRIDS[grid][0]
    assert not refusal(grid, name)
