"""One rank's error becomes every rank's: a block in which no rank raises alone.

with guarded(watchdog, "step 4"):
    ...                         # local work and collectives
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from megapack.board import Failure
from megapack.errors import RankError
from megapack.watchdog import Watchdog

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
