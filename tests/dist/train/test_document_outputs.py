"""Commands of the documents print what the documents show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from tests.shown_outputs import Shown, difference, shown_outputs

pytestmark = pytest.mark.dist

# Commands before the first that trains, and those from it on.
CASES = [
    ("README.md", False),
    ("docs/quick_start.md", False),
    ("docs/quick_start.md", True),
    ("docs/first_model.md", True),
    ("docs/vision.md", True),
]
_SLOW = [("docs/quick_start.md", True)]
# What the commands read of the clone that they are started in.
_CLONE = ("configs", "examples", "tools")
_TIMEOUT_S = 600


def parts(document: str) -> dict[bool, list[Shown]]:
    """Commands with an output block: whether they train, or follow others that do."""
    pairs = shown_outputs(document)
    first = next((n for n, pair in enumerate(pairs) if pair.trains), len(pairs))
    return {False: pairs[:first], True: pairs[first:]}


def run(commands: str, folder: Path, repo_root: Path) -> str:
    """What the commands print to standard output."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(repo_root),
        "OMP_NUM_THREADS": "1",
    }
    script = f'set -euo pipefail\nmegapack() {{ "$PYTHON" -m megapack "$@"; }}\n{commands}'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        timeout=_TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_output_block_is_compared() -> None:
    found = {
        (page, trains)
        for page in {page for page, _ in CASES}
        for trains, pairs in parts(page).items()
        if pairs
    }
    assert found == set(CASES)


def test_the_example_is_drawn_as_the_page_says(repo_root: Path) -> None:
    text = (repo_root / "docs" / "quick_start.md").read_text(encoding="utf-8")
    (drawn,) = re.findall(r"`(numpy\.random\..*)`", text)
    written = (repo_root / "examples" / "lengths.csv").read_text(encoding="utf-8").split()
    assert written == ["length", *map(str, eval(drawn, {"numpy": numpy}))]


@pytest.mark.parametrize(
    ("page", "trains"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case in _SLOW)) for case in CASES],
)
def test_commands_print_what_the_page_shows(
    page: str, trains: bool, tmp_path: Path, repo_root: Path
) -> None:
    if page in ("docs/first_model.md", "docs/vision.md"):
        transformers = pytest.importorskip("transformers")
    for name in _CLONE:
        (tmp_path / name).symlink_to(repo_root / name)
    for pair in parts(page)[trains]:
        printed = run(pair.commands, tmp_path, repo_root)
        wrong = difference(pair.output, printed)
        assert wrong is None, f"{page} shows\n{wrong}\nand {pair.commands}prints\n{printed}"
    if page == "docs/first_model.md":
        # The folder that the page's export wrote is one for other readers.
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "toy_trained")
        assert model.config.num_hidden_layers == 2
    if page == "docs/vision.md":
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            tmp_path / "toy_images_trained"
        )
        assert model.config.vision_config.depth == 4
