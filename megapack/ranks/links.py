"""A process's links to the other ranks of its job, in addition to Megatron's process groups.

`Ranks` owns them. Inside `Ranks.guarded` one rank's error becomes every rank's:

    with ranks.guarded("step 4"):
        ...                         # local work and collectives
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist

from megapack.errors import ConfigError, RankError
from megapack.ranks.agree import Agreement, Agreements
from megapack.ranks.board import Failure
from megapack.ranks.interrupt import Interrupt
from megapack.ranks.place import Place
from megapack.ranks.watchdog import Watchdog
from megapack.ranks.watchdog_config import WatchdogConfig

T = TypeVar("T")

# Seconds that this rank waits, after another rank broke a collective, for that rank's failure to be
# reported or for its process to be gone. Chosen by hand.
_CAUSE_S = 4.0
# What NCCL says where it refuses this rank's own call, such as two ranks on one GPU.
_REFUSED = "invalid usage"
# Parts of the messages of errors that a collective raises when another rank ends.
_BROKEN = ("gloo/", "NCCL", "nccl", "Connection closed by peer", "Connection reset by peer")


class Ranks:
    """The threads and connections that link this process to the other ranks of its job.

    Agreements: one thread and one gloo group. They pack the next step's rows while a step runs, and
    check that all ranks make the same call. Watchdog: two threads and a connection to the job's
    store. It makes an error or the death of one rank an error of every rank within seconds, and
    logs late steps. Without it, a rank that fails leaves the others waiting until the process
    group's timeout.

        ranks = Ranks.start()                           # on all ranks together
        adapter = ScheduleAdapter(chunks, layout=layout, ranks=ranks)
        ...
        ranks.close()                                   # `launch.stop` and the process's end do too

    Make one with `start` or `alone`.

    Attributes:
        watchdog: None if it is off.
        place: what this rank is doing; its main thread keeps it up to date.
        ends_process: whether a failure ends the process.
    """

    def __init__(
        self,
        watchdog: Watchdog | None,
        agreements: Agreements | None,
        *,
        ends_process: bool = False,
    ) -> None:
        self.watchdog = watchdog
        self.ends_process = ends_process
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
            config: the limits above which a step is late.
            watchdog: False starts no watchdog.
            ends_process: the watchdog ends the process if its main thread does not return after
                a failure.
            interrupt: passes signals to the watchdog.
        """
        started = None
        if watchdog:
            started = Watchdog(config, ends_process=ends_process, interrupt=interrupt)
        ranks = cls(started, Agreements(started), ends_process=ends_process)
        if not _open:
            # The one that is registered first runs last.
            atexit.register(_leave_if_broken)
            atexit.register(_close_at_exit)
        _open.append(ranks)
        return ranks

    @classmethod
    def alone(cls) -> Ranks:
        """For a job of one process: no thread, no group, no store.

        Raises:
            ConfigError: the job has more processes, which have to agree before each step.
        """
        ranks = cls(None, None)
        ranks.check()
        return ranks

    def check(self) -> None:
        """Raise ConfigError if these are `alone` in a job of several processes.

        They may have been made before the job's process group.
        """
        if self._agreements is None and _world() > 1:
            raise ConfigError(
                f"Ranks.alone() in a job of {_world()} processes; use Ranks.start(), or "
                "Ranks.start(watchdog=False)"
            )

    @property
    def has_failed(self) -> bool:
        """Whether a rank failed, so that process groups cannot be used any more."""
        return self.watchdog is not None and self.watchdog.failure is not None

    @contextlib.contextmanager
    def guarded(self, step: str = "", predicted_s: float | None = None) -> Iterator[None]:
        """Within the block, an error of one rank is raised on all ranks.

        Args:
            step: the step's name in errors and logs; a named block is also timed. Inside a named
                block the outer name and clock stay. "" for a block that is not a step.
            predicted_s: seconds that the step should take; None if unknown.

        Raises:
            RankError: on every rank: which rank failed, where, and how. Process groups cannot be
                used any more, and each later block raises it at once. Three kinds of errors stay
                unchanged: those that every rank raises by itself, those in a job of one rank, and
                Ctrl-C on the rank where it was pressed.
        """
        watchdog = self.watchdog
        if watchdog is None:
            yield
            return
        watchdog.raise_failure()
        place = watchdog.place
        outer = place.step
        place.step = outer or step
        with watchdog.watching(predicted_s, timed=bool(step)):
            try:
                yield
                # A broken collective may return as if nothing had happened.
                watchdog.raise_failure()
            except GeneratorExit:
                raise
            except KeyboardInterrupt:
                watchdog.report(Failure(text=f"rank {watchdog.rank} was interrupted{place.within}"))
                raise
            except BaseException as error:
                if watchdog.world == 1 or getattr(error, "on_all_ranks", False):
                    raise
                raise _shared_error(watchdog, error) from error
            finally:
                place.step = outer
                if not outer:
                    place.enter("idle")

    def prepare(self, work: Callable[[], T], same: Callable[[], Mapping[str, str]]) -> Agreement[T]:
        """Start local work, and agree on it with all ranks; a collective.

        In a job of one process the work runs at once. See `Agreements.start`.
        """
        if self._agreements is not None:
            return self._agreements.start(work, same)
        future: Future[T] = Future()
        try:
            future.set_result(work())
        except Exception as error:  # raised by `Agreement.result`
            future.set_exception(error)
        return Agreement(future, None)

    def close(self, failure: Failure | None = None) -> None:
        """End the threads: normally, or with a failure that the other ranks raise."""
        if self in _open:
            _open.remove(self)
        if not _open:
            atexit.unregister(_close_at_exit)
        if failure is not None or self.has_failed:
            _broken.append(self)
        elif not _open:
            atexit.unregister(_leave_if_broken)
        if self.watchdog is not None:
            self.watchdog.stop(failure)
        if self._agreements is not None:
            self._agreements.stop()


# Every `Ranks` of this process that was started and not closed.
_open: list[Ranks] = []
# Those that were closed after a failure.
_broken: list[Ranks] = []
# The process group and the `Ranks` of `process_ranks`; at most one entry.
_of_process: list[tuple[dist.ProcessGroup, Ranks]] = []


def process_ranks() -> Ranks:
    """The `Ranks` that adapters of this process share unless their caller passes another one.

    The first call starts it and is a collective of all ranks. In a job of one process it is
    `Ranks.alone()`.
    """
    if _world() == 1:
        return Ranks.alone()
    default = dist.distributed_c10d._get_default_group()
    while _of_process:
        group, ranks = _of_process[0]
        if group is default and ranks in _open:
            return ranks
        _of_process.clear()
        ranks.close()
    _of_process.append((default, Ranks.start()))
    return _of_process[0][1]


def close_all() -> None:
    """Close every `Ranks` of this process that is open."""
    for ranks in list(_open):
        ranks.close()


def _shared_error(watchdog: Watchdog, error: BaseException) -> RankError:
    failure = watchdog.failure
    verb = "failed"
    if failure is None and _is_broken_collective(error):
        failure = _cause(watchdog)
        verb = "lost its connection to another rank"
    if failure is None:
        failure = Failure.of(f"rank {watchdog.rank} {verb}{watchdog.place.within}:", error)
    failure = watchdog.report(failure)
    watchdog.wait_until_acknowledged()
    return failure.error()


def _is_broken_collective(error: BaseException) -> bool:
    """Whether the error is that of a collective which broke because another rank ended."""
    if _REFUSED in str(error):
        return False
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _BROKEN)
    )


def _cause(watchdog: Watchdog) -> Failure | None:
    """The failure of the rank that broke a collective; None if it is not known in time."""
    end = time.monotonic() + _CAUSE_S
    while time.monotonic() < end:
        if watchdog.failure is not None:
            return watchdog.failure
        if gone := watchdog.peers.ended():
            # If that rank posted its failure right before it ended, `report` returns that one.
            return watchdog.gone_failure(gone)
        time.sleep(0.1)
    return None


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _leave_if_broken() -> None:
    """End the process here if one of its threads still waits in a collective that broke.

    The wait may end while Python shuts down. Python then ends the thread inside of C++ code, which
    aborts the process: exit code 134 and a core dump, instead of 1.
    """
    fails = any(ranks.ends_process for ranks in _broken) or getattr(sys, "last_value", None)
    waits = any(one.name.startswith("megapack-") for one in threading.enumerate())
    if _broken and fails and waits:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(RankError.exit_code)


def _close_at_exit() -> None:
    """Close every `Ranks`, and report an error that ended the script outside a step.

    Without the report the other ranks would wait for this one.
    """
    error = getattr(sys, "last_value", None)
    for ranks in list(_open):
        failure = None
        if error is not None and ranks.watchdog is not None:
            rank = ranks.watchdog.rank
            failure = Failure.of(f"rank {rank} ended with", error, gone=(rank,))
        ranks.close(failure)
