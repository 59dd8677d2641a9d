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

from megapack.errors import ConfigError, DataError
from megapack.job.train.folder import RunFolder

pytestmark = pytest.mark.unit


def folder(path: Path, name: str = "run") -> RunFolder:
    """A run folder that is closed again."""
    run = RunFolder(str(path), name)
    run.close()
    return run


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
