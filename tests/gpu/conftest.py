"""All tests share one run of the jobs: importing the GPU packages takes longer than one part."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu.run import Results, run


@pytest.fixture(scope="session")
def gpu_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of the jobs; also written to the file that MEGAPACK_GPU_RESULTS names."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    kept = os.environ.get("MEGAPACK_GPU_RESULTS")
    return run("cuda", Path(kept) if kept else tmp_path_factory.mktemp("gpu") / "results.json")
