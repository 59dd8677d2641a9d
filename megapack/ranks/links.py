"""A process's links to the other ranks of its job, in addition to Megatron's process groups.

`Ranks` owns them. Inside `Ranks.guarded` one rank's error becomes every rank's:

    with ranks.guarded("step 4"):
        ...                         # local work and collectives
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist

from megapack.config.sections import WatchdogConfig
from megapack.errors import ConfigError, RankError
from megapack.ranks.agree import Agreement, Agreements
from megapack.ranks.board import Failure
from megapack.ranks.interrupt import Interrupt
from megapack.ranks.place import Place
from megapack.ranks.watchdog import Watchdog

# A collective breaks because of another rank, which needs a moment to post its failure.
_CAUSE_S = 4.0
_BROKEN = ("gloo/", "NCCL", "nccl", "Connection closed by peer", "Connection reset by peer")


@contextlib.contextmanager
def guarded(
    watchdog: Watchdog,
    step: str = "",
    predicted_s: float | None = None,
) -> Iterator[None]:
    """Within the block an error of one rank is raised on all of them.

    Args:
        step: names the step in errors and logs, and starts its clock; inside a named block the
            outer name and clock stay. "" for a block that is not a step.
        predicted_s: seconds that the step should take; None if unknown.

    Raises:
        RankError: on every rank: which one failed, where, and how. Process groups are of no use
            any more, and each later block raises it at once. Errors that every rank raises by
            itself are not changed, nor are those of a job of one rank, nor Ctrl-C on the rank
            where it was pressed.
    """
    watchdog.raise_failure()
    place = watchdog.place
    outer = place.step
    place.step = outer or step
    with contextlib.ExitStack() as watched:
        watched.enter_context(watchdog.expecting())
        if step:
            watched.enter_context(watchdog.timing(predicted_s))
        try:
            yield
            # A collective that was broken may end as if nothing had happened.
            watchdog.raise_failure()
        except GeneratorExit:
            raise
        except KeyboardInterrupt:
            watchdog.tell(Failure(text=f"rank {watchdog.rank} was interrupted{place.within}"))
            raise
        except BaseException as error:
            if watchdog.world == 1 or getattr(error, "on_all_ranks", False):
                raise
            raise _shared_error(watchdog, error) from error
        finally:
            place.step = outer
            if not outer:
                place.enter("idle")


def _shared_error(watchdog: Watchdog, error: BaseException) -> RankError:
    failure = watchdog.failure
    verb = "failed"
    if failure is None and _is_broken_collective(error):
        failure = _cause(watchdog)
        verb = "lost its connection to another rank"
    if failure is None:
        failure = Failure.of(f"rank {watchdog.rank} {verb}{watchdog.place.within}:", error)
    failure = watchdog.tell(failure)
    watchdog.wait_until_heard()
    return failure.error()


def _is_broken_collective(error: BaseException) -> bool:
    """Whether another rank's end broke a collective of this one."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _BROKEN)
    )


def _cause(watchdog: Watchdog) -> Failure | None:
    end = time.monotonic() + _CAUSE_S
    while time.monotonic() < end:
        if watchdog.failure is not None:
            return watchdog.failure
        if gone := watchdog.peers.ended():
            # It may have posted its failure right before it ended.
            return watchdog.gone(gone)
        time.sleep(0.1)
    return None


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
        """Of a job of one process: no thread, no group, no store.

        Raises:
            ConfigError: the job has more processes, which have to agree before each step.
        """
        if _world() > 1:
            raise ConfigError(
                f"Ranks.alone() in a job of {_world()} processes; use Ranks.start(), or "
                "Ranks.start(watchdog=False)"
            )
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
    if _world() == 1:
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


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


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
