"""Features beside plain rows on a GPU, against one unpadded sample at a time; see `features`."""

from __future__ import annotations

import pytest

from tests.gpu.run import Results
from tests.gpu.test_gpu import (
    ATTENTIONS,
    check_bf16,
    check_families,
    check_fp32,
    part,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("attention", ["te", "sdpa"])
def test_recorded_experts_are_replayed_in_another_packing(
    attention: str, gpu_results: Results
) -> None:
    found = part(gpu_results, "features", f"replay_{attention}")
    assert found["wrong_choices"] == 0
    assert found["grouped"] == (attention == "te")
    check_fp32(found)
    check_fp32(found["given"])
    assert abs(found["given"]["expected_loss"] - found["expected_loss"]) > 1e-4


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_windows_and_sinks_equal_the_reference(attention: str, gpu_results: Results) -> None:
    found = part(gpu_results, "features", f"windows_{attention}")
    assert found["most_samples_in_a_row"] > 2
    check_families(attention, found)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_windows_and_sinks_run_shared_prefixes(attention: str, gpu_results: Results) -> None:
    found = part(gpu_results, "features", f"windows_shared_{attention}")
    assert found["shared_tokens"] > 97
    assert (found["varlen_calls"] > 0) == (attention != "sdpa")
    check_families(attention, found)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_windows_and_sinks_run_samples_in_several_rows(
    attention: str, gpu_results: Results
) -> None:
    found = part(gpu_results, "features", f"windows_split_{attention}")
    assert found["rows_with_pieces"] > 2
    assert (found["varlen_calls"] > 0) == (attention != "sdpa")
    check_families(attention, found)


def test_transformer_engine_runs_windows_itself(gpu_results: Results) -> None:
    found = part(gpu_results, "features", "windows_alone_te")
    assert found["most_samples_in_a_row"] > 2
    assert found["varlen_calls"] == 0
    check_bf16(found)


@pytest.mark.parametrize("attention", ["te", "varlen"])
def test_mamba_layers_are_as_close_as_one_sample_at_a_time(
    attention: str, gpu_results: Results
) -> None:
    found = part(gpu_results, "features", f"mamba_{attention}")
    check_bf16(found)
    check_bf16(found["split"])


def test_a_deterministic_process_repeats_its_bits(gpu_results: Results) -> None:
    found = part(gpu_results, "features", "deterministic_varlen")
    # Transformer Engine's with flash-attn 2, or on other GPUs than Hopper's.
    assert found["chosen"] in ("te", "varlen")
    assert found["tensors"] > 50
    assert found["losses"][0] != found["losses"][1]
    assert not found["unequal"]
