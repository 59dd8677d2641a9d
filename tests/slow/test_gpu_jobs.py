"""The GPU tests' jobs on a CPU: all but the kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.run import run
from tests.gpu.test_gpu import holds_bf16, holds_fp32, holds_isolation

pytestmark = pytest.mark.slow


def test_sdpa_and_stages_that_share_a_device_equal_the_reference(tmp_path: Path) -> None:
    found = run("cpu", tmp_path / "results.json", job_s=300, total_s=600)
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert list(found) == ["sdpa", "pipeline_sdpa"]
    holds_isolation(found["sdpa"].pop("isolation"))
    assert {**found["sdpa"], **found["pipeline_sdpa"]}.keys() == {
        *("fp32", "bf16", "pp2_fp32", "pp2_bf16", "pp2_vpp2_fp32", "pp2_vpp2_bf16")
    }
    for parts in found.values():
        for name, part in parts.items():
            (holds_fp32 if name.endswith("fp32") else holds_bf16)(part)
