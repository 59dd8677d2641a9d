"""The loops of the documents run as they stand, and no gradient depends on the layout.

A loss is no witness: at a ratio of 1, GRPO's does not depend on the weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.dist.spawn import run_job
from tests.documents import python_blocks
from tests.hf_models import make_folder
from tests.toy_towers import write_image_model

pytestmark = pytest.mark.dist

# The steps that each document's blocks run.
STEPS = {"README.md": 3, "docs/own_loop.md": 6, "docs/api/hf.md": 1, "docs/vision.md": 3}


def norms(document: str, layout: str, folder: Path) -> list[float]:
    """Norms of the whole gradient after each step of a document's blocks."""
    make_folder(folder / "models/Qwen3-0.6B", "qwen3")
    if document == "docs/vision.md":
        write_image_model(folder / "toy_images")
    args = [document, layout]
    done = run_job(4, "tests.dist.train.documents_worker", args, timeout_s=200, cwd=folder)
    assert done.returncode == 0, done.stdout[-6000:]
    of_ranks = [json.loads(text) for text in re.findall(r"norms: (\[.*?\])", done.stdout)]
    assert of_ranks == 4 * of_ranks[:1]
    return list(of_ranks[0])


# Their loop is that of the README.
ONCE = ("docs/api/hf.md",)


@pytest.mark.parametrize("document", STEPS)
def test_gradients_of_a_document_do_not_depend_on_the_layout(document: str, tmp_path: Path) -> None:
    (pipeline,) = set(re.findall(r"Layout\(dp=2[^)]*\)", "".join(python_blocks(document))))
    measured = norms(document, pipeline, tmp_path / "pipeline")
    assert len(measured) == STEPS[document]
    if document in ONCE:
        return
    assert measured == pytest.approx(norms(document, "Layout(dp=4)", tmp_path / "dp4"), rel=1e-4)
