"""Models of Hugging Face folders equal transformers, which runs one unpadded sample at a time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.hf.hf_cases import HF_CASES, LAYOUTS, ROWS, run_hf_cases, runnable
from tests.dist.run_cases import selected_names
from tests.marks import needs_hybrid

pytestmark = pytest.mark.dist

# The families of each layout here; tools/exactness.py runs all cases.
_FAMILIES = {
    "cp2": (
        "llama qwen2_window qwen3 olmo3 gemma4_text mixtral glm_moe_dsa ernie4_5 "
        "hunyuan_v1_moe gemma2 mimo_mtp"
    ),
    "tp2_sp": (
        "mistral llama3_rope qwen3_yarn olmo2 phi3 gemma4_experts qwen2_moe "
        "deepseek_v32 moonlight seed_oss hunyuan_v1_dense deepseek_v2_groups glm4 "
        "minimax_m2 qwen3_next_mtp qwen3_5 qwen2_moe_hybrid qwen3_vl_moe nemotron_super_mtp"
    ),
    "pp2_vpp2": (
        "mistral_window qwen2 qwen3_tied gemma3_text deepseek_v2 mimo glm4_moe_lite_mtp "
        "qwen3_tied_hybrid qwen3_vl"
    ),
    "dp2": "qwen3_moe glm4_moe glm4_moe_lite ernie4_5_moe qwen3_5_moe qwen2_5_vl nemotron_super",
}
LAYOUT_OF = {one: layout for layout, own in _FAMILIES.items() for one in own.split()}
NAMES = [
    name
    for name, case in HF_CASES.items()
    # The families with the most parts, on all layouts.
    if case.layout_name in (LAYOUT_OF.get(case.family, case.layout_name), *ROWS)
]
# Of GPTs; others have the same parts.
_IN_EACH_RUN = {
    *("deepseek_v3-single", "qwen3_yarn-tp2_sp", "qwen2_moe-tp2_sp", "deepseek_v32-tp2_sp"),
    *("gpt_oss-tp2_sp", "deepseek_v2_groups-tp2_sp", "minimax_m2-tp2_sp"),
    *("gemma4_experts-tp2_sp", "gpt_oss-pp2_vpp2", "gemma3_text-pp2_vpp2"),
    *("glm4_moe_lite_mtp-pp2_vpp2", "llama-cp2", "qwen3-cp2", "deepseek_v3-cp2"),
    *("qwen3_vl_moe-tp2_sp", "glm_moe_dsa-cp2", "olmo3-cp2", "qwen3_moe-dp2", "glm4_moe_lite-dp2"),
    *("gemma2-prefixes", "gemma3_text-wide", "gemma3_text-pieces"),
}
WEEKLY_CASES = {n for n in NAMES if not HF_CASES[n].is_hybrid and n not in _IN_EACH_RUN}
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
