"""The board: what ranks report to each other through the job's store, without collectives.

A rank that is stuck in a collective receives no messages there, but the store that the job was set
up with still answers. It holds the first failure, a heartbeat of each rank, and how many ranks know
of the failure.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from megapack.errors import RankError
from megapack.ranks.threads import DaemonThread

T = TypeVar("T")

_NO_FAILURE = "-"
# Longest wait for an answer of the store, which normally takes milliseconds. If the store's host is
# frozen, torch's client waits forever, whatever timeout was set. So calls run on a thread, and
# their caller waits only this long.
_ANSWER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a job cannot go on; all ranks report the same one."""

    text: str
    """One line: the rank, what it was doing, what happened."""
    traceback: str = ""
    """The traceback on the rank that failed."""
    gone: tuple[int, ...] = ()
    """Ranks that will not answer: killed or stopped."""

    @classmethod
    def of(cls, who: str, error: BaseException, *, gone: tuple[int, ...] = ()) -> Failure:
        """The failure that an error causes.

        Args:
            who: the first words of its text, with the rank and its place.
        """
        text = f"{who} {type(error).__name__}: {error}".partition("\n")[0]
        lines = traceback.format_exception(error)
        return cls(text=text, traceback="".join(lines), gone=gone)

    def error(self) -> RankError:
        """The error that every rank raises, with the traceback as a note."""
        error = RankError(self.text)
        # Rank 0 prints errors of all ranks; if it is gone, the next rank does.
        error.printed_by = next(rank for rank in itertools.count() if rank not in self.gone)
        if self.traceback:
            error.add_note(self.traceback)
        return error


@dataclass(frozen=True)
class Process:
    """A rank's process on this host."""

    rank: int
    pid: int
    started: str
    """Its start time, which differs for a later process with the same pid; "" if unknown."""

    @classmethod
    def of(cls, rank: int, pid: int) -> Process:
        """The process that has this pid now."""
        return cls(rank, pid, _stat(pid)[1])

    def state(self) -> Literal["running", "stopped", "gone"]:
        """Its state now; always "running" on a system without /proc."""
        state, started = _stat(self.pid)
        if started != self.started or state in ("Z", "X"):
            return "gone"
        return "stopped" if state in ("T", "t") else "running"


class Board:
    """A rank's view of the job's store. All ranks make their boards in the same order.

    Methods raise the store's error if its host is gone, and TimeoutError if it does not answer.

    Args:
        store: any store that all ranks share.
        rank, world: of this process.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        # Its own connection: calls on a shared one would queue behind another caller's wait.
        own = store.clone() if hasattr(store, "clone") else store
        # Keys begin with the number of times that this rank has joined, so that several jobs can
        # share a store. The number is the same on all ranks.
        number = own.add(f"megapack/joined/{rank}", 1)
        self._thread = DaemonThread("megapack-board")
        self._late: Future[Any] | None = None
        prefixed: Any = dist.PrefixStore(f"megapack/{number}", own)
        self._store = prefixed
        self._num_beats = 0
        self._is_store_gone = False
        self._store.compare_set("failure", "", _NO_FAILURE)
        self.beat_and_read()
        mine = Process.of(rank, os.getpid())
        self._host_key = f"host/{_process_table()}"
        self._store.append(self._host_key, f"{mine.rank} {mine.pid} {mine.started},")

    def beat_and_read(self) -> Failure | None:
        """Show that this process is alive, and return the first failure reported, if any."""
        self._num_beats += 1
        beat = str(self._num_beats)

        def beat_and_read() -> bytes:
            self._store.set(f"beat/{self.rank}", beat)
            return bytes(self._store.get("failure"))

        return _read(self._ask(beat_and_read))

    def num_beats(self, rank: int) -> int:
        """How many beats a rank has sent; 0 for one that never joined."""
        return self._number(f"beat/{rank}")

    def processes_on_host(self) -> list[Process]:
        """The processes of the other ranks on this host that have joined so far."""
        content = self._ask(lambda: self._store.get(self._host_key))
        entries = content.decode().split(",")[:-1]
        fields = (entry.split(" ") for entry in entries)
        processes = [Process(int(rank), int(pid), started) for rank, pid, started in fields]
        return [process for process in processes if process.rank != self.rank]

    def post(self, failure: Failure) -> Failure:
        """Report a failure; returns the first one that any rank reported, which all ranks raise."""
        text = json.dumps(asdict(failure))
        first = self._ask(lambda: self._store.compare_set("failure", _NO_FAILURE, text))
        return _read(first) or failure

    def leave(self) -> None:
        """Record that this rank ends normally."""
        self._ask(lambda: self._store.set(f"left/{self.rank}", "1"))

    def has_left(self, rank: int) -> bool:
        """Whether a rank has ended normally."""
        return bool(self._number(f"left/{rank}"))

    def acknowledge(self) -> int:
        """Record that this rank knows of the failure; returns how many ranks do."""
        return int(self._ask(lambda: self._store.add("acknowledged", 1)))

    def num_acknowledged(self) -> int:
        """How many ranks know of the failure."""
        return int(self._ask(lambda: self._store.add("acknowledged", 0)))

    def close(self) -> None:
        """End the thread, unless a call blocks it; later calls raise RuntimeError."""
        self._thread.stop(0.0 if self._is_blocked() else _ANSWER_S)

    def _ask(self, call: Callable[[], T]) -> T:
        # Do not ask a store that is gone again: torch prints a page of text at each attempt.
        if self._is_store_gone:
            raise ConnectionError("the store is gone")
        if self._is_blocked():
            raise TimeoutError(f"an earlier call has not returned in {_ANSWER_S:g} s")
        answer = self._thread.submit(call)
        if not wait([answer], _ANSWER_S).done:
            self._late = answer
            raise TimeoutError(f"no answer in {_ANSWER_S:g} s")
        try:
            return answer.result()
        except dist.DistNetworkError:
            self._is_store_gone = True
            raise

    def _is_blocked(self) -> bool:
        """Whether a call that ran out of time still blocks the thread."""
        return self._late is not None and not self._late.done()

    def _number(self, key: str) -> int:
        def read() -> int:
            return int(self._store.get(key)) if self._store.check([key]) else 0

        return self._ask(read)


def _read(content: bytes) -> Failure | None:
    text = content.decode()
    if text == _NO_FAILURE:
        return None
    fields = json.loads(text)
    return Failure(**{**fields, "gone": tuple(fields["gone"])})


def _process_table() -> str:
    """Identifies the host's or container's process table: containers may share a host name but have
    pids of their own."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _stat(pid: int) -> tuple[str, str]:
    """State and start time of a process from Linux's /proc; ("X", "") if it is gone."""
    if not os.path.exists("/proc/self/stat"):
        return "?", ""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]
