"""One process of a machine holds the lock, the others wait for it, and no fault stops them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megapack.base import machine_lock
from megapack.base.machine_lock import MachineLock

pytestmark = pytest.mark.unit


@contextlib.contextmanager
def _held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock until it is killed."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from megapack.base.machine_lock import MachineLock\n"
        "lock = MachineLock(Path(sys.argv[1]), 'is a test')\n"
        "lock.acquire()\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        yield holder
        holder.kill()


def test_a_waiting_process_says_who_has_the_lock_and_gets_it_when_that_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "lock"
    lock = MachineLock(path, "compiles the planner")
    monkeypatch.setattr(machine_lock, "_LINE_S", 0.0)
    monkeypatch.setattr(lock, "_next_line_s", 0.0)
    with _held(path) as holder:

        def kill(seconds: float) -> None:
            holder.kill()
            holder.wait()

        monkeypatch.setattr(machine_lock.time, "sleep", kill)
        lock.acquire()
    said = caplog.messages[0]
    assert said.startswith(f"waiting for process {holder.pid} on ")
    assert said.endswith("which compiles the planner (0 s so far)")
    assert path.read_text().startswith(f"process {os.getpid()} on ")
    lock.release()


def test_a_process_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine_lock, "_PATIENCE_S", 0.1)
    lock = MachineLock(tmp_path / "lock", "compiles the planner")
    with _held(tmp_path / "lock"):
        lock.acquire()
    assert lock.waited_s > 0.1
    assert caplog.messages[-1].endswith("compiles the planner; this process no longer waits for it")


def test_a_file_system_without_locks_makes_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    lock = MachineLock(tmp_path / "lock", "compiles the planner")
    lock.acquire()
    assert lock.waited_s == 0


def test_a_folder_that_cannot_be_made_makes_nobody_wait(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lock = MachineLock(tmp_path / "file" / "lock", "compiles the planner")
    lock.acquire()
    assert lock.waited_s == 0
    lock.release()
