"""Packed rows on a GPU, by each attention, against one unpadded sample at a time.

In fp32 the bound is that of the CPU tests, 1e-5. In bf16 the bound is twice the error of one sample
at a time in bf16, for gradients and for log-probs.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tests.gpu.outcomes import OUTCOMES
from tests.gpu.run import Results

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ATTENTIONS = ("te", "varlen", "sdpa")
PIPELINES = ("pp2", "pp2_vpp2")
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
# The ratio of the rounding units 2^-4 (e4m3) and 2^-9 (bf16).
FP8_OVER_BF16 = 32


def part(results: Results, job: str, name: str) -> dict[str, Any]:
    """Results of a part; fails with its error, and skips what cannot run here."""
    OUTCOMES.looked_at.append((job, name))
    parts = results.get(job, results.get("reference", {}))
    if job not in results and not parts:
        pytest.skip(f"{job} is not installed here")
    if name not in parts and "job" not in parts:
        pytest.skip(f"{job} has no {name} on this device")
    found = parts.get(name, parts.get("job", {}))
    assert "error" not in found, found["error"]
    if "skipped" in found:
        pytest.skip(found["skipped"])
    return found


@pytest.mark.parametrize("attention", ["te", "sdpa"])
def test_fp32_equals_the_one_sample_reference(attention: str, gpu_results: Results) -> None:
    check_fp32(part(gpu_results, attention, "fp32"))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_bf16_is_as_close_as_one_sample_at_a_time(attention: str, gpu_results: Results) -> None:
    check_bf16(part(gpu_results, attention, "bf16"))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_shared_prefixes_equal_the_reference(attention: str, gpu_results: Results) -> None:
    found = part(gpu_results, attention, "shared_prefixes")
    assert found["shared_tokens"] > 97
    check_families(attention, found)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_samples_in_several_rows_equal_the_reference(attention: str, gpu_results: Results) -> None:
    found = part(gpu_results, attention, "split_samples")
    assert found["rows_with_pieces"] > 2
    check_families(attention, found)


@pytest.mark.parametrize("attention", ["te", "varlen"])
def test_gated_delta_nets_are_as_close_as_one_sample_at_a_time(
    attention: str, gpu_results: Results
) -> None:
    found = part(gpu_results, attention, "hybrid")
    check_bf16(found)
    check_bf16(found["split"])


@pytest.mark.parametrize("layout", PIPELINES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stages_on_one_gpu_equal_the_reference(
    layout: str, dtype: str, gpu_results: Results
) -> None:
    job = "pipeline_te" if find_spec("transformer_engine") else "pipeline_sdpa"
    found = part(gpu_results, job, f"{layout}_{dtype}")
    check = check_fp32 if dtype == "fp32" else check_bf16
    check(found)


@pytest.mark.parametrize("attention", ["te", "sdpa"])
def test_experts_equal_the_one_sample_reference(attention: str, gpu_results: Results) -> None:
    found = part(gpu_results, attention, "experts")
    check_fp32(found)
    assert found["grouped"] == (attention == "te")


@pytest.mark.parametrize("attention", ["te", "sdpa"])
def test_reductions_overlap_with_steps_of_different_m(attention: str, gpu_results: Results) -> None:
    check_overlap(part(gpu_results, attention, "overlap"))


@pytest.mark.parametrize("attention", ["te", "sdpa"])
def test_weight_gradients_come_later(attention: str, gpu_results: Results) -> None:
    check_split_backward(part(gpu_results, attention, "split_backward"))


@pytest.mark.parametrize("attention", ["te", "varlen"])
def test_no_forward_waits_for_the_device(attention: str, gpu_results: Results) -> None:
    assert part(gpu_results, attention, "waits")["num_microbatches"] > 1


def test_logprobs_come_from_fp32_logits(gpu_results: Results) -> None:
    found = part(gpu_results, "te", "head_precision")
    assert found["fp32 (megapack's head)"] < 1e-4 < found["rounded to bf16"]


def check_overlap(found: dict[str, Any]) -> None:
    """An exact step after one of fewer micro-batches."""
    assert 0 < found["num_microbatches_before"] < found["num_microbatches"]
    check_fp32(found)


def check_split_backward(found: dict[str, Any]) -> None:
    """Exact, with the four linear layers of each of four layers put off in every micro-batch."""
    assert found["products_put_off"] == [4 * 4] * found["num_microbatches"]
    check_fp32(found)


def check_families(attention: str, found: dict[str, Any]) -> None:
    (check_fp32_numbers if attention == "sdpa" else check_bf16)(found)


def check_fp32(found: dict[str, Any]) -> None:
    """The CPU tests' bounds, on a plan that packs several samples into a row."""
    assert found["most_samples_in_a_row"] > 2
    check_fp32_numbers(found)


def check_fp32_numbers(found: dict[str, Any]) -> None:
    assert found["gradient_norm"] > 1e-3
    assert found["gradient_error"] < 1e-5
    assert found["loss"] == pytest.approx(found["expected_loss"], rel=1e-5, abs=1e-7)
    assert found["logprob_mean_error"] < 1e-5
    assert found["logprob_max_error"] < 3e-5


def check_bf16(found: dict[str, Any]) -> None:
    """At most twice the error of one sample at a time."""
    assert 0 < found["gradient_error"] < 2 * found["one_sample_gradient_error"]
    assert 0 < found["logprob_mean_error"] < 2 * found["one_sample_logprob_mean_error"]
    assert found["loss"] == pytest.approx(found["expected_loss"], rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_token_sees_another_sample(attention: str, gpu_results: Results) -> None:
    check_isolation(part(gpu_results, attention, "isolation"))


def check_isolation(found: dict[str, Any]) -> None:
    """Changing one sample changes the others no more than repeating the same run does."""
    assert found["samples_in_the_row"] > 2
    assert found["changed"] > 1e-3
    assert found["others"] <= found["repeated"]


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_fp8_errors_follow_its_rounding(recipe: str, gpu_results: Results) -> None:
    found = part(gpu_results, "te", f"fp8_{recipe}")
    assert found["unaligned_rows"] == 0
    bf16 = found["bf16_logprob_mean_error"]
    assert 0 < bf16 < found["fp8_logprob_mean_error"] < 2 * FP8_OVER_BF16 * bf16


def test_row_slices_equal_transformer_engines(gpu_results: Results) -> None:
    assert part(gpu_results, "te", "cp_slices")["different_positions"] == 0


def test_the_chunked_head_needs_a_fifth_of_whole_logits(gpu_results: Results) -> None:
    found = part(gpu_results, "te", "head_memory")
    assert 0 < found["chunks"] < 0.2 * found["whole"]
