"""Models of Hugging Face folders equal transformers, which runs one unpadded sample at a time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.hf.hf_cases import HF_CASES, LAYOUTS, ROWS, run_hf_cases, runnable
from tests.dist.run_cases import selected_names
from tests.marks import needs_hybrid

pytestmark = pytest.mark.dist

# The layout of each family here; tools/exactness.py runs all cases.
LAYOUT_OF = {
    "llama": "cp2",
    "mistral": "tp2_sp",
    "mistral_window": "pp2_vpp2",
    "qwen2_window": "cp2",
    "llama3_rope": "tp2_sp",
    "qwen2": "pp2_vpp2",
    "qwen3": "cp2",
    "qwen3_tied": "pp2_vpp2",
    "qwen3_yarn": "tp2_sp",
    "olmo2": "tp2_sp",
    "olmo3": "cp2",
    "phi3": "tp2_sp",
    "gemma3_text": "pp2_vpp2",
    "gemma4_text": "cp2",
    "gemma4_experts": "tp2_sp",
    "qwen2_moe": "tp2_sp",
    "mixtral": "cp2",
    "qwen3_moe": "dp2",
    "deepseek_v32": "tp2_sp",
    "glm_moe_dsa": "cp2",
    "glm4_moe": "dp2",
    "moonlight": "tp2_sp",
    "deepseek_v2": "pp2_vpp2",
    "glm4_moe_lite": "dp2",
    "seed_oss": "tp2_sp",
    "ernie4_5": "cp2",
    "ernie4_5_moe": "dp2",
    "hunyuan_v1_dense": "tp2_sp",
    "hunyuan_v1_moe": "cp2",
    "deepseek_v2_groups": "tp2_sp",
    "gemma2": "cp2",
    "glm4": "tp2_sp",
    "minimax_m2": "tp2_sp",
    "mimo": "pp2_vpp2",
    "mimo_mtp": "cp2",
    "glm4_moe_lite_mtp": "pp2_vpp2",
    "qwen3_next_mtp": "tp2_sp",
    "qwen3_5": "tp2_sp",
    "qwen3_5_moe": "dp2",
    "qwen3_tied_hybrid": "pp2_vpp2",
    "qwen2_moe_hybrid": "tp2_sp",
}
NAMES = [
    name
    for name, case in HF_CASES.items()
    # The families with the most parts, on all layouts.
    if case.layout_name in (LAYOUT_OF.get(case.family, case.layout_name), *ROWS)
]
# Others have the same parts.
WEEKLY_CASES = {
    *("llama3_rope-tp2_sp", "mistral-tp2_sp", "moonlight-tp2_sp", "seed_oss-tp2_sp", "glm4-tp2_sp"),
    *("olmo2-tp2_sp", "hunyuan_v1_dense-tp2_sp", "qwen2-pp2_vpp2", "mistral_window-pp2_vpp2"),
    *("deepseek_v2-pp2_vpp2", "deepseek_v3-pp2_vpp2", "mimo-pp2_vpp2", "qwen3_tied-pp2_vpp2"),
    *("qwen2_window-cp2", "ernie4_5-cp2", "mixtral-cp2", "gpt_oss-cp2", "deepseek_v3-dp2"),
    *("gpt_oss-dp2", "ernie4_5_moe-dp2", "gemma3_text-prefixes", "olmo3-wide", "gemma2-wide"),
    *("phi3-pieces", "olmo3-pieces", "gemma4_text-cp2", "gemma4_experts-prefixes"),
    "gemma4_text-pieces",
    *("deepseek_v3-tp2_sp", "gpt_oss-single", "glm4_moe-dp2", "phi3-wide", "gemma2-pieces"),
    *("olmo3-prefixes", "mimo_mtp-cp2", "hunyuan_v1_moe-cp2", "phi3-tp2_sp", "gemma2-cp2"),
    *("gemma4_text-prefixes", "gemma4_text-wide", "gemma4_experts-wide", "gemma4_experts-pieces"),
    *("gpt_oss-prefixes", "gpt_oss-wide", "gpt_oss-pieces"),
}
PARAMS = [
    pytest.param(name, marks=needs_hybrid if HF_CASES[name].is_hybrid else ()) for name in NAMES
]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What the workers found, by case, for the cases of the selected tests."""
    wanted = selected_names(request)
    return run_hf_cases(
        [name for name in runnable() if name in wanted], tmp_path_factory.mktemp("hf_models")
    )


@pytest.mark.parametrize("name", PARAMS)
def test_logprobs_and_entropies_equal_transformers(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[name]
    assert result["num_tokens"] > 200
    for value in ("logprobs", "entropy"):
        assert result[f"{value}_mean_error"] < 1e-5
        assert result[f"{value}_max_error"] < 3e-5


@pytest.mark.parametrize("name", PARAMS)
def test_gradients_of_an_sft_step_equal_transformers(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[name]
    assert result["num_tensors"] > 20
    assert result["gradient_norm"] > 1
    assert result["gradient_error"] < 1e-5
    assert result["worst_tensor_error"] < 3e-5, result["worst_tensor"]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-6)
    assert result["mtp_loss"] == pytest.approx(result["expected_mtp_loss"], rel=1e-6)


@pytest.mark.parametrize("name", PARAMS)
def test_rows_hold_several_samples(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert results[name]["most_samples"] > 1
    assert results[name]["num_rows"] > 1


def test_every_layout_is_in_the_sample() -> None:
    assert {HF_CASES[name].layout_name for name in NAMES} == {*LAYOUTS, *ROWS}


@pytest.mark.parametrize(
    "name", [param for param in PARAMS if HF_CASES[str(param.values[0])].layout_name in ROWS]
)
def test_rows_are_made_as_the_case_says(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    made = {
        "prefixes": result["shared_tokens"] > 10,
        "wide": result["most_ranks"] == 2,
        "pieces": result["num_pieces"] > 2,
    }
    assert made[HF_CASES[name].layout_name]
