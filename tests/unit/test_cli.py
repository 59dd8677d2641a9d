"""The command line: exit codes, one line per error, and no heavy import before it is needed."""

from __future__ import annotations

import argparse
import json
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
from megapack.commands.parser import Parser
from megapack.errors import RunInterrupted, ScheduleError
from megapack.ranks.board import Failure
from megapack.ranks.interrupt import StoppedEarlyError
from tests.run_folder import make_plan

pytestmark = pytest.mark.unit

CONFIG = "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"


def run(repo_root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m megapack`; its last line on stderr says whether torch was imported."""
    code = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        f"sys.argv = ['megapack', *{list(args)!r}]\n"
        "runpy.run_module('megapack', run_name='__main__')\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
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
    """The other lines on stderr, after a check that torch was not imported."""
    *printed, imported = done.stderr.splitlines()
    assert imported == "False"
    return printed


@pytest.mark.parametrize(
    "args",
    [
        ("train", "CONFIG", "--dry-run", "world=2"),
        (
            *("plan", "LENGTHS", "--config", "CONFIG", "--dp", "2", "--max-tokens-per-gpu", "99"),
            *("-o", "PLAN"),
        ),
    ],
)
def test_the_sizes_of_a_hugging_face_folder_need_no_torch(
    repo_root: Path, args: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = {
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"model_type": "qwen3", "vocab_size": 320, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config = tmp_path / "job.yaml"
    model = f"model: {{hf_path: {tmp_path}}}\n"
    config.write_text(f"name: x\ndevice: cpu\nplan: {{max_tokens_per_gpu: 4096}}\n{model}")
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("5\n7\n9\n")
    paths = {"CONFIG": str(config), "LENGTHS": str(lengths), "PLAN": str(tmp_path / "plan.json")}
    speed = () if args[0] == "train" else ("--peak-tflops", "100")
    done = run(repo_root, *(paths.get(arg, arg) for arg in args), *speed)
    assert (done.returncode, lines(done)) == (0, [])


def _parsers() -> list[Parser]:
    """The parser of each command, and of the actions of `data` and `patch`."""
    parsers = []
    for name in cli.COMMANDS:
        command = cli._parser([name])._subparsers._group_actions[0].choices[name]  # type: ignore
        parsers.append(command)
        for action in command._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return parsers


@pytest.mark.parametrize("parser", _parsers(), ids=lambda parser: parser.prog)
def test_help_is_short_and_describes_every_option(
    parser: Parser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = parser.format_help()
    assert len(text.splitlines()) <= 80
    for action in parser._actions:
        described = action.help or isinstance(action, argparse._SubParsersAction)
        assert described, action
        # "(1)" alone is a default, not a description.
        assert not (action.help or "x").startswith("("), action
    if parser.prog.count(" ") == 1:
        usage, _, example, *_ = text.splitlines()
        assert usage.startswith(f"usage: {parser.prog}")
        assert f"megapack {parser.prog.split()[1]}" in example


@pytest.mark.parametrize("topic", ["model", "policy"])
def test_a_topic_shows_only_its_own_options(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", f"--help-{topic}"])
    out = capsys.readouterr().out
    assert exit_.value.code == 0
    shown = {"model": "--peak-tflops", "policy": "--split-samples {off,auto}"}
    assert [name for name, option in shown.items() if option in out] == [topic]
    assert "--length-column" not in out


def test_train_lists_every_shipped_config(repo_root: Path) -> None:
    done = run(repo_root, "train", "--list")
    assert (done.returncode, lines(done)) == (0, [])
    names, sentences = done.stdout.splitlines()[::2], done.stdout.splitlines()[1::2]
    assert names == sorted(path.stem for path in (repo_root / "configs").glob("*.yaml"))
    assert "    GRPO of Qwen3-4B, on one node of 8 GPUs of 80 GB" in sentences


@pytest.mark.parametrize(("args", "known"), [((), 0), (("fly",), 0), (("train",), 1)])
def test_an_incomplete_command_prints_one_line(
    args: tuple[str, ...], known: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(args)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megapack: ")
    assert line.endswith(f"see {' '.join(['megapack', *args[:known]])} --help")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ScheduleError("ranks [1] differ in plan"), 2),
        (RunInterrupted("a signal ended the run after step 3"), 75),
    ],
)
def test_a_commands_error_prints_one_line(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "run", fail)
    assert cli.main(["train", "config.yaml"]) == code
    assert capsys.readouterr().err == f"megapack: {error}\n"


@pytest.mark.parametrize(
    ("rank", "gone", "prints"), [(0, (), True), (1, (), False), (1, (0,), True)]
)
def test_the_first_remaining_rank_prints_a_failure(
    rank: int,
    gone: tuple[int, ...],
    prints: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: object) -> int:
        raise Failure(text="rank 2 failed in step 4", traceback="its lines", gone=gone).error()

    monkeypatch.setattr(train, "run", fail)
    monkeypatch.setenv("RANK", str(rank))
    assert cli.main(["train", "config.yaml"]) == 1
    lines = "megapack: rank 2 failed in step 4\nits lines\n"
    assert capsys.readouterr().err == (lines if prints else "")


def test_a_run_ended_by_a_signal_exits_with_75(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(args: object) -> int:
        raise RunInterrupted("a signal ended the run after step 3")

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "run", stop)
    assert cli.main(["train", "config.yaml"]) == 75
    assert capsys.readouterr().err == "megapack: a signal ended the run after step 3\n"


def test_ctrl_c_prints_one_line_except_in_user_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "run", stop)
    assert cli.main(["train", "config.yaml"]) == 130
    assert capsys.readouterr().err == "megapack: interrupted\n"

    def stop_early(args: object) -> int:
        raise StoppedEarlyError

    monkeypatch.setattr(train, "run", stop_early)
    assert cli.main(["train", "config.yaml"]) == RunInterrupted.exit_code
    assert "before its first step" in capsys.readouterr().err
    monkeypatch.setattr(run_command, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        cli.main(["run", "script.py"])


def shell(tmp_path: Path, command: str) -> tuple[int, str]:
    """Exit code and stderr of a command line with `megapack` in it, under pipefail."""
    command = command.replace("megapack", f"{sys.executable} -m megapack")
    environment = {**os.environ, "PYTHONPATH": str(Path(megapack.__file__).parents[1])}
    # Without it, output to a pipe is written at once, when the command ends.
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


def test_an_unwritable_stdout_sets_the_exit_code(tmp_path: Path) -> None:
    plan = make_plan()
    (tmp_path / "a.json").write_text(plan.to_json())
    (tmp_path / "b.json").write_text(replace(plan, max_tokens_per_gpu=2048).to_json())
    code, err = shell(tmp_path, "megapack show a.json > /dev/full")
    assert (code, err) == (
        2,
        "megapack: standard output: No space left on device; make room, or send it elsewhere\n",
    )
    assert shell(tmp_path, "megapack show a.json >&-") == (0, "")
    # The exit code reports the difference though nobody reads the output.
    assert shell(tmp_path, "megapack diff a.json b.json | true") == (1, "")
    assert shell(tmp_path, "megapack diff a.json a.json | true") == (0, "")
    # Printed while the options are read.
    assert shell(tmp_path, "megapack train --list | true") == (141, "")
    assert shell(tmp_path, "megapack plan --help | true") == (141, "")


def test_a_closed_pipe_exits_with_141(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A command that prints more than a pipe holds fails before it has its own exit code."""

    def fail(args: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(train, "run", fail)
    monkeypatch.setattr(cli, "_stdout_is_lost", lambda: True)
    assert cli.main(["train", "config.yaml"]) == 141
    # A broken pipe other than standard output is a bug.
    monkeypatch.setattr(cli, "_stdout_is_lost", lambda: False)
    with pytest.raises(BrokenPipeError):
        cli.main(["train", "config.yaml"])
