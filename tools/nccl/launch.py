"""Starts the ranks of a job as processes of their own, and ends them by limits of their own.

`tests.dist.spawn` forks its ranks instead, but CUDA does not work after a fork.

A job has three limits: seconds in all, seconds without progress (a rank notes progress in a file),
and seconds that the other ranks have after one failed. Ranks that are still there then print where
they stand and are killed. Each rank's output is a file, so that a job that fails can be read.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]
PROGRESS = "MEGAPACK_CHECK_PROGRESS"
"""The variable with a rank's file of progress, see `on_ranks.progress`."""
_STORE_S = 60.0
# After it prints where it stands, a rank that hangs is killed.
_DUMP_S = 1.0
_KILL_S = 20.0
# A line of a rank's stack, as faulthandler prints it: the innermost call first.
_FRAME = re.compile(r'^  File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended."""

    codes: tuple[int | None, ...]
    """The exit code of each rank, minus the signal that ended it; None if it would not die."""
    seconds: float
    limit: str
    """The limit that ended it; "" if all ranks ended by themselves."""
    killed: tuple[int, ...]
    """The ranks that did not end by themselves."""
    logs: tuple[Path, ...]
    """The output of each rank."""

    @property
    def is_good(self) -> bool:
        return not any(self.codes) and None not in self.codes

    def text(self, rank: int) -> str:
        """The output of a rank."""
        return self.logs[rank].read_text(encoding="utf-8", errors="replace")

    @property
    def reason(self) -> str:
        """Why it is not good, in one line: the limit, an error, where killed ranks stood."""
        if self.is_good:
            return ""
        parts = [self.limit] if self.limit else []
        own = {rank: code or 0 for rank, code in enumerate(self.codes) if rank not in self.killed}
        for rank, code in own.items():
            if code < 0:
                parts.append(f"rank {rank} was ended by {signal.Signals(-code).name}")
        failed = next((rank for rank, code in own.items() if code > 0), None)
        if failed is not None:
            parts.append(f"rank {failed}: {error_line(self.text(failed))}")
        # The one that does not come stands elsewhere than those that wait for it.
        places: dict[str, list[int]] = {}
        for rank in self.killed:
            places.setdefault(place(self.text(rank)), []).append(rank)
        parts += [f"ranks {ranks} stood {where}" for where, ranks in places.items()]
        return "; ".join(parts)


def run_ranks(
    command: Sequence[str],
    *,
    world: int,
    environment: Callable[[int], Mapping[str, str]],
    folder: Path,
    limit_s: float,
    stall_s: float,
    grace_s: float,
) -> Ended:
    """Run a command of Python on `world` ranks of this machine; a rank alone is told of no others.

    Args:
        command: arguments of the interpreter.
        environment: a rank's variables in addition to this process's.
        folder: for the ranks' logs and files of progress; replaced if they exist.
        grace_s: seconds that the others have after a rank failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = _store(world) if world > 1 else None
    logs = tuple(folder / f"rank{rank}.log" for rank in range(world))
    notes = tuple(folder / f"rank{rank}.progress" for rank in range(world))
    started = time.monotonic()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            own = {PROGRESS: str(notes[rank])}
            if store is not None:
                own |= _meeting(store.port, rank, world)
            notes[rank].unlink(missing_ok=True)
            with open(logs[rank], "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, *command],
                    cwd=ROOT,
                    env={**os.environ, **own, **environment(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            ranks.append(process)
        limit = _wait(ranks, notes, limit_s, stall_s, grace_s)
    finally:
        killed = _end(ranks)
    codes = tuple(process.poll() for process in ranks)
    return Ended(
        codes=codes,
        seconds=time.monotonic() - started,
        limit=limit,
        killed=killed,
        logs=logs,
    )


def _store(world: int) -> TCPStore:
    # Port 0: the system chooses one, and it is this process's while the job runs.
    wait = datetime.timedelta(seconds=_STORE_S)
    return TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False, timeout=wait)


def _meeting(port: int, rank: int, world: int) -> dict[str, str]:
    """The variables by which a rank finds the others, as torchrun sets them."""
    return {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
        **{"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)},
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def error_line(text: str) -> str:
    """The last line of a rank's output that names an error, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or line.startswith("megapack:")]
    return (errors or lines or ["no output"])[-1][:400]


def place(text: str) -> str:
    """Where a rank that was asked for its stack stood: its innermost line of this repository."""
    stack = text.rpartition("Current thread")[2].splitlines()
    frames = [found for line in stack if (found := _FRAME.match(line))]
    own = [found for found in frames if found["path"].startswith(f"{ROOT}{os.sep}")]
    # Packages may lie in a folder of it, and what notes operations stands around each.
    others = (f"{os.sep}site-packages{os.sep}", f"{os.sep}rehearsal{os.sep}")
    own = [found for found in own if not any(part in found["path"] for part in others)] or own
    if not own:
        return "somewhere that it did not say"
    inner = "" if frames[0] is own[0] else f"{frames[0]['name']} of "
    path = own[0]["path"].removeprefix(f"{ROOT}{os.sep}")
    return f"in {inner}{own[0]['name']} ({path}:{own[0]['line']})"


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]],
    notes: Sequence[Path],
    limit_s: float,
    stall_s: float,
    grace_s: float,
) -> str:
    """Wait until all ranks have ended; the limit that was reached, or ""."""
    end = time.monotonic() + limit_s
    limit = f"ran past {limit_s:.0f} s"
    moved, seen = time.monotonic(), 0.0
    has_failed = False
    while any(process.poll() is None for process in ranks):
        now = time.monotonic()
        newest = max((_mtime(path) for path in notes), default=0.0)
        if newest != seen:
            moved, seen = now, newest
        if now > end:
            return limit
        if not has_failed and now - moved > stall_s:
            return f"no progress for {stall_s:.0f} s"
        if not has_failed and any(process.poll() for process in ranks):
            has_failed = True
            if now + grace_s < end:
                end, limit = now + grace_s, f"other ranks ran on for {grace_s:.0f} s after a fault"
        time.sleep(0.05)
    return ""


def _mtime(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, ...]:
    """End what runs, after it has printed where it stands; the ranks that had to be ended."""
    running = [rank for rank, process in enumerate(ranks) if process.poll() is None]
    for rank in running:
        ranks[rank].send_signal(signal.SIGUSR2)
    if running:
        time.sleep(_DUMP_S)
    for rank in running:
        # The session of the rank, which has the process's number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks[rank].pid, signal.SIGKILL)
    for rank in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks[rank].wait(_KILL_S)
    return tuple(running)
