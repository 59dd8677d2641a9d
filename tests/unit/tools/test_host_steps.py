"""The runner and the benchmarks of hosts' steps refuse wrong input in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import bench_host_step
from tools.bench_host_step import Step
from tools.pages import measured
from tools.pages.measured import Head

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


def test_a_run_of_the_benchmark_writes_its_row_in_place_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "MEASURED", tmp_path)

    def write(host: str, options: str, seconds: float) -> list[str]:
        ways = ([Step(seconds, [5, 5, 5], None)], [Step(2.0, [5, 5], None)])
        path = bench_host_step.write_row(host, options, [ways, ways])
        assert Head.read(path).title == "CPU seconds of hosts' steps with the patches"
        return [line for line in path.read_text().splitlines() if line.startswith("| ")][1:]

    assert len(write("verl 0.9.0", "", 3.0)) == 1
    assert len(write("slime", "--layout dp=2", 3.0)) == 2
    (slime, verl) = write("verl 0.9.1", "", 2.0)
    assert slime.startswith("| slime | --layout dp=2 | 3, 2 | 1.50 (1.50 to 1.50), 2 |")
    assert verl.startswith("| verl 0.9.1 |  | 3, 2 | 1.00 (1.00 to 1.00), 2 |")


def test_a_row_names_the_options_that_are_not_the_default() -> None:
    given = {"layout": "pp=2", "case": "a b", "baseline_case": None}
    default = {"layout": "pp=2", "case": "", "baseline_case": None}.get
    assert bench_host_step.options_text(given, default) == "--case 'a b'"
