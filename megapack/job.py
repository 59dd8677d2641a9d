"""A process's links to the other ranks of its job, in addition to Megatron's process groups."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist

from megapack.board import Failure
from megapack.consensus import Agreement, Agreements
from megapack.guard import guarded
from megapack.interrupt import Interrupt
from megapack.loop_config import WatchdogConfig
from megapack.place import Place
from megapack.watchdog import Watchdog

T = TypeVar("T")


class Ranks:
    """What this process runs to hear of the other ranks of its job.

    Agreements: one thread and one gloo group. They pack the next step's rows while a step runs, and
    check that all ranks make the same call. Watchdog: two threads and a connection to the job's
    store. An error or the death of one rank becomes an error of every rank within seconds, and late
    steps are logged. Without it a rank that fails leaves the others waiting until the process
    group's timeout.

        ranks = Ranks.start()                           # on all ranks together
        adapter = ScheduleAdapter(chunks, layout=layout, ranks=ranks)
        ...
        ranks.close()                                   # `launch.stop` and the process's end do too

    Make one with `start` or `alone`.

    Attributes:
        watchdog: None if it is off.
        place: where this rank is in its work; its main thread keeps it up to date.
    """

    def __init__(self, watchdog: Watchdog | None, agreements: Agreements | None) -> None:
        self.watchdog = watchdog
        self.place = Place() if watchdog is None else watchdog.place
        self._agreements = agreements

    @classmethod
    def start(
        cls,
        config: WatchdogConfig | None = None,
        *,
        watchdog: bool = True,
        ends_process: bool = False,
        interrupt: Interrupt | None = None,
    ) -> Ranks:
        """Start the threads; a collective of all ranks of `torch.distributed`'s default group.

        Args:
            config: when steps are late.
            watchdog: False leaves the watchdog off.
            ends_process: the watchdog ends the process if its main thread does not come back from
                a failure.
            interrupt: passes signals to the watchdog.
        """
        watching = None
        if watchdog:
            watching = Watchdog(config, ends_process=ends_process, interrupt=interrupt)
        ranks = cls(watching, Agreements(watching))
        if not _open:
            atexit.register(_close_at_exit)
        _open.append(ranks)
        return ranks

    @classmethod
    def alone(cls) -> Ranks:
        """Of a job of one process: no thread, no group, no store."""
        return cls(None, None)

    @property
    def has_failed(self) -> bool:
        """Whether a rank failed, so that process groups are of no use any more."""
        return self.watchdog is not None and self.watchdog.failure is not None

    @contextlib.contextmanager
    def guarded(self, step: str = "", predicted_s: float | None = None) -> Iterator[None]:
        """Within the block an error of one rank is raised on all of them; see `guard.guarded`."""
        if self.watchdog is None:
            yield
            return
        with guarded(self.watchdog, step, predicted_s):
            yield

    def prepare(self, work: Callable[[], T], same: Callable[[], Mapping[str, str]]) -> Agreement[T]:
        """Begin local work, and agree on it with all ranks; a collective.

        A process alone does the work at once. See `Agreements.start`.
        """
        if self._agreements is not None:
            return self._agreements.start(work, same)
        found: Future[T] = Future()
        try:
            found.set_result(work())
        except Exception as error:  # raised by `Agreement.result`
            found.set_exception(error)
        return Agreement(found, None)

    def close(self, failure: Failure | None = None) -> None:
        """End the threads, in good order or with a failure that the other ranks raise."""
        if self in _open:
            _open.remove(self)
        if not _open:
            atexit.unregister(_close_at_exit)
        if self.watchdog is not None:
            self.watchdog.stop(failure)
        if self._agreements is not None:
            self._agreements.stop()


_open: list[Ranks] = []
_shared: list[tuple[dist.ProcessGroup, Ranks]] = []


def shared_ranks() -> Ranks:
    """The ranks that all adapters of this process share, unless they are given others.

    Started at the first call, a collective of all ranks; `Ranks.alone()` in a job of one process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks.alone()
    default = dist.distributed_c10d._get_default_group()
    while _shared:
        group, ranks = _shared[0]
        if group is default and ranks in _open:
            return ranks
        _shared.clear()
        ranks.close()
    _shared.append((default, Ranks.start()))
    return _shared[0][1]


def close_all() -> None:
    """Close all ranks that are open, in good order."""
    for ranks in list(_open):
        ranks.close()


def _close_at_exit() -> None:
    """Close all; other ranks would wait for one whose script ended with an error outside a step."""
    error = getattr(sys, "last_value", None)
    for ranks in list(_open):
        failure = None
        if error is not None and ranks.watchdog is not None:
            rank = ranks.watchdog.rank
            failure = Failure.of(f"rank {rank} ended with", error, gone=(rank,))
        ranks.close(failure)
