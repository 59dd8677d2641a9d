"""The loops that the documents show run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.spawn import run_job
from tests.documents import python_blocks
from tests.hf_models import make_folder

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("document", ["README.md", "docs/quick_start.md", "docs/api/hf.md"])
def test_the_blocks_of_a_document_run(document: str, tmp_path: Path) -> None:
    assert python_blocks(document)
    make_folder(tmp_path / "models/Qwen3-0.6B", "qwen3")
    done = run_job(4, "tests.dist.train.documents_worker", [document], timeout_s=200, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count("the loss is finite: True") == 4
