"""What ranks tell each other beside their collectives, through the job's store.

A rank that is stuck in a collective hears nothing there. The store that the job was set up with
answers all the same: the first failure stands on it, who is alive, and who has heard.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from megapack.bounded_calls import BoundedCalls
from megapack.errors import RankError

T = TypeVar("T")

_NO_FAILURE = "-"
# A store answers within milliseconds; its host may be frozen.
_ANSWER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a job cannot go on, as every rank tells it."""

    text: str
    """One line: the rank, where it was, what happened."""
    traceback: str = ""
    """Of the rank that failed."""
    gone: tuple[int, ...] = ()
    """Ranks that will not answer: killed or stopped."""

    @classmethod
    def of(cls, who: str, error: BaseException, *, gone: tuple[int, ...] = ()) -> Failure:
        """An error as the others are told it; `who` says whose it is, and where."""
        text = f"{who} {type(error).__name__}: {error}".partition("\n")[0]
        told = "".join(traceback.format_exception(error))
        return cls(text=text, traceback=told, gone=gone)

    def error(self) -> RankError:
        """What every rank raises; the traceback is its note."""
        error = RankError(self.text)
        # Where rank 0 was killed, somebody else has to say so.
        error.teller = next(rank for rank in itertools.count() if rank not in self.gone)
        if self.traceback:
            error.add_note(self.traceback)
        return error


@dataclass(frozen=True)
class Process:
    """A rank's process on this host."""

    rank: int
    pid: int
    started: str
    """Tells it from a later process of the same number; "" where the system does not say."""

    @classmethod
    def of(cls, rank: int, pid: int) -> Process:
        """The process that has this number now."""
        return cls(rank, pid, _stat(pid)[1])

    def state(self) -> Literal["running", "stopped", "gone"]:
        """Whether it runs; "running" where the system does not say."""
        state, started = _stat(self.pid)
        if started != self.started or state in ("Z", "X"):
            return "gone"
        return "stopped" if state in ("T", "t") else "running"


class Board:
    """A rank's view of the job's store. Made on all ranks, in the same order.

    Args:
        store: any store that all ranks share.
        rank, world: of this process.

    Raises what the store raises where its host is gone, and TimeoutError where it does not answer.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        # A connection of its own: a call that waits in another one would hold up this one.
        own = store.clone() if hasattr(store, "clone") else store
        # How often a rank joined tells boards of one store apart; all ranks count alike.
        number = own.add(f"megapack/joined/{rank}", 1)
        self._calls = BoundedCalls("megapack-board", limit_s=_ANSWER_S)
        prefixed: Any = dist.PrefixStore(f"megapack/{number}", own)
        self._store = prefixed
        self._num_beats, self._is_gone = 0, False
        self._store.compare_set("failure", "", _NO_FAILURE)
        self.beat()
        mine = Process.of(rank, os.getpid())
        self._host_key = f"host/{_process_table()}"
        entry = f"{mine.rank} {mine.pid} {mine.started},"
        self._store.append(self._host_key, entry)

    def beat(self) -> None:
        """Show that this process lives."""
        self._num_beats += 1
        self._ask(lambda: self._store.set(f"beat/{self.rank}", str(self._num_beats)))

    def beats(self, ranks: Sequence[int]) -> list[int]:
        """How often each of them showed it; 0 for one that never joined."""
        return [self._number(f"beat/{rank}") for rank in ranks]

    def processes_on_host(self) -> list[Process]:
        """The other ranks on this host that have joined so far."""
        content = self._ask(lambda: self._store.get(self._host_key))
        entries = content.decode().split(",")[:-1]
        found = (entry.split(" ") for entry in entries)
        processes = [Process(int(rank), int(pid), started) for rank, pid, started in found]
        return [process for process in processes if process.rank != self.rank]

    def post(self, failure: Failure) -> Failure:
        """Tell a failure; returns the one that was told first."""
        text = json.dumps(asdict(failure))
        first = self._ask(lambda: self._store.compare_set("failure", _NO_FAILURE, text))
        return _read(first) or failure

    def failure(self) -> Failure | None:
        """The failure that was told first."""
        return _read(self._ask(lambda: self._store.get("failure")))

    def leave(self) -> None:
        """Say that this rank ends in good order."""
        self._ask(lambda: self._store.set(f"left/{self.rank}", "1"))

    def has_left(self, rank: int) -> bool:
        """Whether a rank said so."""
        return bool(self._number(f"left/{rank}"))

    def hear(self) -> int:
        """Say that this rank knows of the failure; how many do."""
        return int(self._ask(lambda: self._store.add("heard", 1)))

    def num_heard(self) -> int:
        """How many ranks know of the failure."""
        return int(self._ask(lambda: self._store.add("heard", 0)))

    def close(self) -> None:
        """End its thread; every later call raises RuntimeError."""
        self._calls.close()

    def _ask(self, call: Callable[[], T]) -> T:
        # Each try to reach a store that is gone would print a page of torch's own.
        if self._is_gone:
            raise ConnectionError("the store is gone")
        try:
            return self._calls.run(call)
        except dist.DistNetworkError:
            self._is_gone = True
            raise

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
    """Names what process ids count in: containers of one host name may have their own."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _stat(pid: int) -> tuple[str, str]:
    """State and start time of a process as Linux tells them; ("X", "") for one that is gone."""
    if not os.path.exists("/proc/self/stat"):
        return "?", ""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]
