"""The demo in a fresh clone: one command makes the environment and runs the main job."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megapack.config import load_config
from megapack.job.config.sections import TrainConfig
from megapack.plan import Plan

pytestmark = pytest.mark.weekly

TIMEOUT_S = 900
NAME = "gpt_tiny_dp2_pp2_vpp2_cpu"


def newcomers_environment() -> dict[str, str]:
    """The environment of a container that has torch installed: here, this process's own packages.

    `.ci/run` covers a machine without torch.
    """
    dropped = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    own = str(Path(sys.prefix, "bin"))
    path = [entry for entry in environment["PATH"].split(os.pathsep) if entry != own]
    return environment | {"PATH": os.pathsep.join(path), "PYTHON": sys.executable}


def run(command: list[str], folder: Path) -> str:
    """Run in its own process group, which is killed on a timeout; returns the output."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=newcomers_environment(),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        print(output[-4000:])
        raise
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    head = subprocess.run(
        ["git", "rev-parse", "--verify", "HEAD"], cwd=repo_root, capture_output=True, check=False
    )
    if head.returncode:
        pytest.skip("not a git checkout with a commit: nothing to clone")
    target = tmp_path_factory.mktemp("newcomer") / "megapack"
    subprocess.run(["git", "clone", "--quiet", str(repo_root), str(target)], check=True)
    return target


def test_the_demo_in_a_fresh_clone(clone: Path, tmp_path: Path) -> None:
    assert not (clone / ".venv").exists()
    output = run([str(clone / "tools" / "demo.sh")], tmp_path)
    print(output[-2000:])
    assert (clone / ".venv" / "megapack.stamp").is_file()
    folder = clone / "runs" / NAME
    assert load_config(folder / "config.yaml", [], TrainConfig).name == NAME
    plan = Plan.from_json((folder / "plan.json").read_text())
    assert plan.steps
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) > 1
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert all(row["tokens"] > 0 for row in rows)
    # Every file left in the checkout is ignored by .gitignore.
    status = ["git", "status", "--porcelain"]
    done = subprocess.run(status, cwd=clone, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_the_environment_is_reused(clone: Path, tmp_path: Path) -> None:
    """A second start installs nothing. Needs the environment of the test above."""
    if not (clone / ".venv" / "megapack.stamp").is_file():
        pytest.skip("the demo did not make its environment")
    assert run([str(clone / "tools" / "venv.sh")], tmp_path) == ""
