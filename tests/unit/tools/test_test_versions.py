"""Which Megatron-Core, Python and tests `tools/test_versions.sh` chooses, and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megapack.base.megatron import TESTED_RELEASES
from tests.child import ROOT

pytestmark = pytest.mark.unit

NEWEST = [*TESTED_RELEASES][-1]
# An interpreter that is of every version, and has the newest release; it prints what it would run.
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    *sys.version_info*) exit 0 ;;
    *importlib.metadata*) [[ "$*" == *"{NEWEST}"* ]]; exit ;;
    *"pip install"*) mkdir -p "${{@: -2:1}}/megatron/core" ;;
    *pytest*)
        echo "$PWD | $PYTHONPATH | $(basename "${{0%/bin/python}}") | $*"
        exit "${{CODE:-0}}"
        ;;
esac
"""
VENV = """#!/usr/bin/env bash
mkdir -p "$1/bin"
cp "$PYTHON" "$1/bin/python"
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A repository with the script and stubs of what it calls."""
    for name in ("tools/test_versions.sh", "megapack/base/megatron.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in (("python", PYTHON), ("tools/venv.sh", VENV)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {"PYTHON311": f"{root}/python", "PYTHON312": f"{root}/python", "PYENV_ROOT": "/absent"}
    return subprocess.run(
        ["tools/test_versions.sh", *arguments],
        cwd=root,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": "", **own, **variables},
    )


def calls(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """Working directory, PYTHONPATH, environment and arguments of each pytest."""
    lines = [line.split(" | ") for line in done.stdout.splitlines() if " | " in line]
    return [[part.strip() for part in line] for line in lines]


def tree(folder: Path, requires: str = "") -> Path:
    """A source tree."""
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").touch()
    if requires:
        (folder / "pyproject.toml").write_text(f'requires-python = "{requires}"\n')
    return folder


def test_each_release_runs_with_its_python_and_folder(copied: Path) -> None:
    done = run(copied, "tests/unit/plan", "-x")
    assert done.returncode == 0, done.stderr
    folders = ["" if one == NEWEST else f"{copied}/.megatron/{one}" for one in TESTED_RELEASES]
    pythons = [f".venv-{python}" for python in TESTED_RELEASES.values()]
    assert [call[1] for call in calls(done)] == folders
    assert [call[2] for call in calls(done)] == pythons
    assert {call[3] for call in calls(done)} == {"-m pytest -p tests.progress tests/unit/plan -x"}


@pytest.mark.parametrize(
    ("requires", "python"), [(">=3.12", "3.12"), (">=3.10", "3.11"), ("", "3.11")]
)
def test_a_source_tree_is_first_on_the_path(copied: Path, requires: str, python: str) -> None:
    folder = tree(copied / "trees" / "megatron", requires)
    done = run(copied, "--megatron", "trees/megatron", "tests/dist", PYTHONPATH="/other")
    assert done.returncode == 0, done.stderr
    (call,) = calls(done)
    first, other = call[1].split(":")
    # Without the tree's other packages, which have names of this repository's.
    assert [path.name for path in Path(first).iterdir()] == ["megatron"]
    assert (Path(first) / "megatron").resolve() == folder / "megatron"
    assert other == "/other"
    assert call[0] == str(copied)
    assert call[2:] == [f".venv-{python}", "-m pytest -p tests.progress tests/dist"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--megatron"], "--megatron needs a release or a folder"),
        (["--megatron", "/absent"], "/absent is neither a tested release (0.16.1, "),
        (["--megatron", "."], ". is neither a tested release ("),
        (["--megatron", "0.17.1", "--megatron", "0.18.2"], "--megatron is given twice"),
        (["tests/unit", "--sample"], "--sample comes before the arguments of pytest"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    copied: Path, arguments: list[str], says: str
) -> None:
    done = run(copied, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout
