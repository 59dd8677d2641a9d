"""The run folder: its files, its lock, and what a resumed run keeps."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megapack import cli
from megapack.cost.model import CostModel
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import CheckpointError, ConfigError, DataError
from megapack.job.train.folder import RunFolder
from megapack.layout import Layout

pytestmark = pytest.mark.unit


def folder(path: Path, name: str = "run") -> RunFolder:
    """A run folder that is closed again."""
    run = RunFolder(str(path), name)
    run.close()
    return run


def test_metrics_are_lines_of_json(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path / "runs"), "run")
    run.append_metrics({"step": 1, "loss": 0.5, "step_predicted_s": None})
    # Each line is flushed, so that a killed run keeps its lines.
    before_close = (run.path / "metrics.jsonl").read_text()
    run.append_metrics({"step": 2, "loss": 0.25, "plan_digest": "ab"})
    run.close()
    assert [json.loads(line) for line in before_close.splitlines()] == [
        {"step": 1, "loss": 0.5, "step_predicted_s": None}
    ]
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_written_as_valid_json(tmp_path: Path, value: float) -> None:
    run = RunFolder(str(tmp_path), "run")
    run.append_metrics({"step": 1, "loss": value})
    run.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = (run.path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse)["step"] == 1


def test_earlier_runs_are_kept_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        folder(tmp_path).write_text("config.yaml", f"run {number}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]
    texts = {p.name: (p / "config.yaml").read_text() for p in tmp_path.iterdir()}
    assert texts == {"run.1": "run 0", "run.2": "run 1", "run": "run 2"}
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
    assert caplog.records[1].getMessage() == (
        f"{tmp_path}/run of an earlier run is kept as {tmp_path}/run.2; this run starts anew in a "
        "new folder"
    )


def test_an_empty_folder_is_used_also_through_a_link(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "run").symlink_to(disk)
    folder(runs).write_text("config.yaml", "run 0")
    assert (disk / "config.yaml").read_text() == "run 0"
    assert os.listdir(runs) == ["run"]
    assert caplog.records == []
    # Now it is not empty.
    folder(runs).write_text("config.yaml", "run 1")
    assert sorted(os.listdir(runs)) == ["run", "run.1"]
    assert (disk / "config.yaml").read_text() == "run 0"
    assert not (runs / "run").is_symlink()
    assert f"kept as {runs}/run.1, a link to {disk}; " in caplog.records[0].getMessage()


def test_a_link_to_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"gone, which does not exist; make that folder, or set"):
        folder(tmp_path)
    assert os.listdir(tmp_path) == ["run"]


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path), "run")
    run.append_metrics({"step": 1})
    for continue_after in (None, 0):
        with pytest.raises(ConfigError, match=rf"run is in use by process {os.getpid()} on .*set "):
            RunFolder(str(tmp_path), "run", continue_after=continue_after)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    run.close()
    folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1"]


def test_a_process_locks_a_folder_until_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    code = (
        "import sys; from pathlib import Path; from megapack.job.train.folder import lock_folder\n"
        "file = lock_folder(Path('run')); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"in use by process {other.pid} on "):
            folder(tmp_path)
        other.kill()
    folder(tmp_path)
    assert os.listdir(tmp_path) == ["run"]


def test_a_folder_without_lock_support_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder(tmp_path)
    (record,) = caplog.records
    assert "no locks" in record.getMessage()


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder(tmp_path)
    run.write_text("plan.json", "first")
    run.write_text("plan.json", "second")
    assert (run.path / "plan.json").read_text() == "second"

    def fail(descriptor: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(CheckpointError, match=r"plan.json cannot be written \(no space left\)"):
        run.write_text("plan.json", "third")
    assert (run.path / "plan.json").read_text() == "second"


def test_writing_leaves_no_temporary_file(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.write_text("config.yaml", "name: ü\n")
    assert sorted(path.name for path in run.path.iterdir()) == [
        ".lock",
        "config.yaml",
        "metrics.jsonl",
    ]
    assert (run.path / "config.yaml").read_bytes() == "name: ü\n".encode()


def test_a_resumed_run_cuts_later_and_partial_lines(tmp_path: Path) -> None:
    """A partial line of a trace may end with `}` like a whole one."""
    run = folder(tmp_path)
    lines = [json.dumps({"step": step, "events": {"a": step}}) + "\n" for step in (1, 2, 3)]
    for name in ("metrics.jsonl", "trace.jsonl"):
        (run.path / name).write_text("".join(lines)[:-2])
    RunFolder(str(tmp_path), "run", continue_after=2).close()
    for name in ("metrics.jsonl", "trace.jsonl"):
        assert (run.path / name).read_text() == "".join(lines[:2])
    (run.path / "metrics.jsonl").write_text(f"{lines[0]}\0\0\n{lines[1]}")
    with pytest.raises(DataError, match=r"metrics.jsonl:2 is not a line of a step"):
        RunFolder(str(tmp_path), "run", continue_after=2)
    assert (run.path / "metrics.jsonl").read_text() == f"{lines[0]}\0\0\n{lines[1]}"


def test_a_resumed_run_replaces_lines_after_its_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path), "run")
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
        run.append_line("trace.jsonl", {"step": step, "events": []})
    run.close()
    with open(run.path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')
    resumed = RunFolder(str(tmp_path), "run", continue_after=2)
    resumed.append_metrics({"step": 3})
    resumed.close()
    lines = (resumed.path / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 1}', '{"step": 2}', '{"step": 3}']
    traced = (resumed.path / "trace.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in traced] == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_written_plan_passes_the_check_command(tmp_path: Path) -> None:
    lengths = [5, 9, 3]
    plan = build_dp_schedule(lengths, layout=Layout(), max_tokens_per_gpu=16)
    run = folder(tmp_path)
    run.write_plan(plan, CostModel(), lengths)
    assert cli.main(["check", str(run.path / "plan.json"), str(run.path / "lengths.txt")]) == 0
