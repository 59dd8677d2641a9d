"""The runner and the benchmarks of hosts' steps refuse wrong input in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import bench_host_step

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], "invalid choice: 'nosuch'"),
        (["slime", "--layout", "xx=2"], "'xx=2' is not a layout"),
        (["slime", "--steps", "1"], "--steps must be at least 2: the first is left out"),
        (["slime", "--rounds", "0"], "--rounds must be at least 1"),
        (["verl", "--shared-prefixes"], "--shared-prefixes is for miles, slime"),
        (["slime"], "put its sources into"),
    ],
)
def test_the_benchmark_of_a_step_refuses(
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MEGAPACK_HOST_SOURCES", raising=False)
    monkeypatch.setattr(sys, "argv", ["bench_host_step.py", *arguments])
    with pytest.raises(SystemExit):
        bench_host_step.main()
    assert says in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "tools/host_steps.sh --sample "),
        (["--sample", "verl"], 2, "--sample has its own hosts; leave out verl"),
        (["verl", "--sample"], 2, "--sample has its own hosts; give it alone"),
        (["nosuch"], 2, "no steps of nosuch; there are:"),
    ],
)
def test_the_runner_of_steps_reads_its_options(
    arguments: list[str], code: int, says: str, repo_root: Path
) -> None:
    done = subprocess.run(
        [str(repo_root / "tools/host_steps.sh"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHON": "/bin/false"},
    )
    assert done.returncode == code
    assert says in done.stdout + done.stderr
