"""All tests share one run of the jobs: importing the GPU packages takes longer than one part."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu.outcomes import OUTCOMES
from tests.gpu.run import Results, run

KEPT = os.environ.get("MEGAPACK_GPU_RESULTS")


@pytest.fixture(scope="session")
def gpu_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of the jobs; also written to the file that MEGAPACK_GPU_RESULTS names."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    return run("cuda", Path(KEPT) if KEPT else tmp_path_factory.mktemp("gpu") / "results.json")


def pytest_runtest_setup() -> None:
    OUTCOMES.begin()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if KEPT:
        OUTCOMES.write(report, Path(KEPT))
