"""The GPU tests' jobs on a CPU: all of their code except the GPU kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import test_gpu_features as features
from tests.gpu.run import run
from tests.gpu.test_gpu import (
    check_bf16,
    check_families,
    check_fp32,
    check_isolation,
    check_overlap,
    check_split_backward,
)

pytestmark = pytest.mark.weekly

FEATURES = (
    features.test_recorded_experts_are_replayed_in_another_packing,
    features.test_windows_and_sinks_equal_the_reference,
    features.test_windows_and_sinks_run_shared_prefixes,
    features.test_windows_and_sinks_run_samples_in_several_rows,
)
"""The checks of the job "features" that SDPA has."""


def test_every_job_equals_the_reference_on_a_cpu(tmp_path: Path) -> None:
    found = run("cpu", tmp_path / "results.json", job_s=300, total_s=600)
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert list(found) == ["sdpa", "pipeline_sdpa", "features"]
    for check_feature in FEATURES:
        check_feature("sdpa", found)
    assert len(found.pop("features")) == 4
    for name in ("shared_prefixes", "split_samples"):
        check_families("sdpa", found["sdpa"].pop(name))
    check_isolation(found["sdpa"].pop("isolation"))
    check_overlap(found["sdpa"].pop("overlap"))
    check_split_backward(found["sdpa"].pop("split_backward"))
    check_fp32(found["sdpa"].pop("experts"))
    assert {**found["sdpa"], **found["pipeline_sdpa"]}.keys() == {
        *("fp32", "bf16", "pp2_fp32", "pp2_bf16", "pp2_vpp2_fp32", "pp2_vpp2_bf16")
    }
    for parts in found.values():
        for name, part in parts.items():
            check = check_fp32 if name.endswith("fp32") else check_bf16
            check(part)
