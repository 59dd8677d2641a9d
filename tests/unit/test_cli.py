"""Commands: exit codes, one line for what is wrong, and no heavy import before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import megapack
from megapack import cli
from megapack.commands import run as run_command
from megapack.commands import train
from megapack.errors import RunInterrupted, ScheduleError
from megapack.ranks.board import Failure
from tests.run_folder import make_plan

pytestmark = pytest.mark.unit

CONFIG = "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"


def run(repo_root: Path, *args: str, rank: str | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m megapack` with these arguments, telling at its end whether torch was imported."""
    code = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        f"sys.argv = ['megapack', *{list(args)!r}]\n"
        "runpy.run_module('megapack', run_name='__main__')\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    if rank is not None:
        env["RANK"] = rank
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=repo_root,
        env=env,
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines on stderr, after checking that the last one says that torch was not imported."""
    *said, imported = done.stderr.splitlines()
    assert imported == "False"
    return said


@pytest.mark.parametrize("args", [("--help",), ("train", "--help")])
def test_help_is_there_without_torch(repo_root: Path, args: tuple[str, ...]) -> None:
    done = run(repo_root, *args)
    assert done.returncode == 0
    assert lines(done) == []
    assert "usage: megapack" in done.stdout
    assert "train" in done.stdout


def test_an_unknown_config_is_one_line_with_the_shipped_ones(repo_root: Path) -> None:
    done = run(repo_root, "train", "no_such_config.yaml")
    assert done.returncode == 2
    (line,) = lines(done)
    assert line.startswith("megapack: no_such_config.yaml: no such file")
    assert CONFIG in line
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("plan.max_token_per_gpu=4", ["max_token_per_gpu", "max_tokens_per_gpu"]),
        ("plan.max_tokens_per_gpu=many", ["plan.max_tokens_per_gpu", "many"]),
        ("layout.pp=0", ["pp", "0"]),
        ("nothing", ["nothing"]),
    ],
)
def test_a_bad_override_is_one_line_that_names_it(
    repo_root: Path, override: str, words: list[str]
) -> None:
    done = run(repo_root, "train", CONFIG, override)
    assert done.returncode == 2
    (line,) = lines(done)
    assert line.startswith("megapack: ")
    assert all(word in line for word in words)


def test_other_ranks_leave_the_line_to_the_first(repo_root: Path) -> None:
    done = run(repo_root, "train", "no_such_config.yaml", rank="3")
    assert done.returncode == 2
    assert lines(done) == []


@pytest.mark.parametrize(("args", "known"), [((), 0), (("fly",), 0), (("train",), 1)])
def test_a_command_line_that_says_nothing_is_one_line(
    args: tuple[str, ...], known: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(args)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megapack: ")
    assert line.endswith(f"see {' '.join(['megapack', *args[:known]])} --help")


def test_an_error_of_a_command_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise ScheduleError("ranks [1] differ in plan")

    monkeypatch.setattr(train, "run", fail)
    assert cli.main(["train", "config.yaml"]) == 2
    assert capsys.readouterr().err == "megapack: ranks [1] differ in plan\n"


@pytest.mark.parametrize(
    ("rank", "gone", "speaks"), [(0, (), True), (1, (), False), (1, (0,), True)]
)
def test_the_first_rank_that_is_left_tells_a_rank_s_failure(
    rank: int,
    gone: tuple[int, ...],
    speaks: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: object) -> int:
        raise Failure(text="rank 2 failed in step 4", traceback="its lines", gone=gone).error()

    monkeypatch.setattr(train, "run", fail)
    monkeypatch.setenv("RANK", str(rank))
    assert cli.main(["train", "config.yaml"]) == 1
    told = "megapack: rank 2 failed in step 4\nits lines\n"
    assert capsys.readouterr().err == (told if speaks else "")


def test_an_error_that_is_ours_to_fix_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(args: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(train, "run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "config.yaml"])


def test_a_run_that_a_signal_ended_has_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(args: object) -> int:
        raise RunInterrupted("a signal ended the run after step 3")

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "run", stop)
    assert cli.main(["train", "config.yaml"]) == 75
    assert capsys.readouterr().err == "megapack: a signal ended the run after step 3\n"


def test_ctrl_c_is_one_line_but_in_programs_of_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "run", stop)
    assert cli.main(["train", "config.yaml"]) == 130
    assert capsys.readouterr().err == "megapack: interrupted\n"
    monkeypatch.setattr(run_command, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        cli.main(["run", "script.py"])


def shell(tmp_path: Path, command: str) -> tuple[int, str]:
    """Exit code and stderr of a command line with `megapack` in it, under pipefail."""
    command = command.replace("megapack", f"{sys.executable} -m megapack")
    environment = {**os.environ, "PYTHONPATH": str(Path(megapack.__file__).parents[1])}
    # What is printed is written at the end then, all at once.
    environment.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=environment,
    )
    return done.returncode, done.stderr


def test_a_lost_standard_output_is_told_by_the_exit_code(tmp_path: Path) -> None:
    plan = make_plan()
    (tmp_path / "a.json").write_text(plan.to_json())
    (tmp_path / "b.json").write_text(replace(plan, max_tokens_per_gpu=2048).to_json())
    code, err = shell(tmp_path, "megapack show a.json > /dev/full")
    assert (code, err) == (
        2,
        "megapack: standard output: No space left on device; make room, or send it elsewhere\n",
    )
    assert shell(tmp_path, "megapack show a.json >&-") == (0, "")
    # What was found is told though nobody reads it.
    assert shell(tmp_path, "megapack diff a.json b.json | true") == (1, "")
    assert shell(tmp_path, "megapack diff a.json a.json | true") == (0, "")


def test_a_command_that_is_cut_off_is_not_done(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that prints more than a pipe holds breaks before it knows its code."""

    def fail(args: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(train, "run", fail)
    monkeypatch.setattr(cli, "_stdout_is_lost", lambda: True)
    assert cli.main(["train", "config.yaml"]) == 141
    # Another pipe than standard output is a mistake of ours.
    monkeypatch.setattr(cli, "_stdout_is_lost", lambda: False)
    with pytest.raises(BrokenPipeError):
        cli.main(["train", "config.yaml"])


def test_it_tells_its_version(repo_root: Path) -> None:
    done = run(repo_root, "--version")
    assert (done.returncode, done.stdout) == (0, f"megapack {megapack.__version__}\n")
    assert lines(done) == []
