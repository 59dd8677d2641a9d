"""Ranks agree before they communicate: a difference, or one rank's error, raises on every rank.

A rank that raises alone leaves the others waiting in a send or receive forever. So all work that
can fail on one rank (its plan, its samples) runs first, and one small all-reduce shows all ranks
whether it succeeded. The all-reduce takes the maximum of a digest of each value and of the digest's
negative: the two maxima add up to 0 only if all ranks have the same value. With digests 5 and 7
they are 7 and -5, which add up to 2. Only in that case do the ranks gather their errors and values,
and every rank raises the same error.

`Agreements` does this for the next step while the current one runs.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist

from megapack.errors import ScheduleError, of_all_ranks
from megapack.ranks.threads import DaemonThread
from megapack.ranks.watchdog import Watchdog

T = TypeVar("T")

_CPU = torch.device("cpu")
# Longest error message that ranks exchange; a longer one is cut. Chosen by hand.
_MESSAGE_CHARS = 448
# Longest value that an error shows; a longer one is replaced by its digest. Chosen by hand.
_VALUE_CHARS = 80
# Most ranks that an error names for one message. Chosen by hand.
_NAMED_RANKS = 8
# Limit on the wait of a node's ranks for their first one: practically none, since that rank may be
# indexing a large data set.
_NODE_TIMEOUT = datetime.timedelta(days=7)
# A waiting rank asks its watchdog for a failure 5 times per second.
_POLL_S = 0.2
# Longest wait for queued agreements when a job ends.
_END_S = 1.0


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device that a group's backend needs its tensors on; None: the default group."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or "gloo" in str(dist.get_backend(group)):
        return _CPU
    return accelerator


def agree(
    work: Callable[[], T],
    *,
    device: torch.device,
    same: Mapping[str, str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> T:
    """Run `work` on every rank and return its result if it succeeds on all of them.

    Args:
        work: local work without communication.
        device: the device of the all-reduce's tensor; the group's backend must support it.
        same: values that must be equal on all ranks, by name. All calls that ranks could confuse
            with each other use the same names.
        group: the ranks that call; None for all. Errors number the ranks within the group.

    Raises:
        ScheduleError: on every rank. It names the ranks whose work failed and their errors, or the
            first value that differs and the ranks that differ in it. A rank that failed chains its
            own error. If all ranks fail with the same message, each raises its own error unchanged.
    """
    values = [_printable(value) for value in (same or {}).values()]
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:  # every local failure must reach the other ranks
        error = caught
    if not _all_agree(values, error, device, group):
        _raise_difference(list(same or {}), error, _gather_reports(values, error, group))
    return result


def on_any_rank(flags: Sequence[bool], *, device: torch.device) -> list[bool]:
    """For each flag, whether any rank has set it; a collective of all ranks."""
    if _is_alone(None) or not flags:
        return list(flags)
    reduced = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in reduced.tolist()]


def agree_one_per_node_first(work: Callable[[], T], *, device: torch.device) -> T:
    """`agree`, but the first rank of each node works before the others start.

    This is for work that leaves a file which saves the other ranks time, such as the index of a
    data set. The first rank may take as long as it needs: the others do not wait under the process
    group's timeout.
    """
    if _is_alone(None):
        return agree(work, device=device)
    done: list[T] = []
    error: Exception | None = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            done.append(work())
        except Exception as caught:  # raised below, on all ranks
            error = caught
    waiting = dist.new_group(backend="gloo", timeout=_NODE_TIMEOUT)
    dist.barrier(group=waiting)
    dist.destroy_process_group(waiting)

    def finish() -> T:
        if error is not None:
            raise error
        return done[0] if done else work()

    return agree(finish, device=device)


class Agreement(Generic[T]):
    """Work that all ranks have started; see `Agreements.start`."""

    def __init__(self, future: Future[T], watchdog: Watchdog | None) -> None:
        self._future = future
        self._watchdog = watchdog

    def result(self, limit_s: float = math.inf) -> T:
        """The result of this rank's work, once all ranks have agreed.

        Args:
            limit_s: how long to wait for the other ranks.

        Raises:
            ScheduleError: as `agree` does.
            RankError: another rank failed or died in the meantime.
            TimeoutError: the other ranks did not join within `limit_s`.
        """
        end = time.monotonic() + limit_s
        while not wait([self._future], _POLL_S).done:
            if self._watchdog is not None:
                self._watchdog.raise_failure()
            if time.monotonic() > end:
                raise TimeoutError(f"the other ranks did not join in {limit_s:g} s")
        return self._future.result()


class Agreements:
    """Prepares the next step and agrees on it while the current one runs.

    A thread packs the rows and calls `agree` on a separate gloo group, which does not wait for the
    device. The constructor is a collective of all ranks, which then call `start` in the same order.

    Args:
        watchdog: ends the wait for a rank that failed. None: the wait lasts until the group's
            timeout.
    """

    def __init__(self, watchdog: Watchdog | None) -> None:
        self._watchdog = watchdog
        self._group = _new_group() if dist.get_world_size() > 1 else None
        self._thread = DaemonThread("megapack-agreements")

    def start(self, work: Callable[[], T], same: Callable[[], Mapping[str, str]]) -> Agreement[T]:
        """Start local work on the thread, and agree on it; a collective of all ranks.

        Args:
            work: see `agree`.
            same: returns the `same` of `agree`; called on the thread.
        """

        def agreed() -> T:
            return agree(work, device=_CPU, same=same(), group=self._group)

        return Agreement(self._thread.submit(agreed), self._watchdog)

    def stop(self) -> None:
        """End the thread after its queued work; after a failure, do not wait for it."""
        has_failed = self._watchdog is not None and self._watchdog.failure is not None
        self._thread.stop(0.0 if has_failed else _END_S)


def _new_group() -> dist.ProcessGroup:
    # By the module that defines it: slime replaces `dist.new_group`, and would make each of these
    # groups again whenever it wakes up.
    group: dist.ProcessGroup = dist.distributed_c10d.new_group(backend="gloo")
    return group


def _all_agree(
    values: list[str],
    error: Exception | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> bool:
    """Whether no rank has an error and all ranks have the same values."""
    if _is_alone(group):
        return error is None
    # Digests below 2**56, so that they and their negatives fit into signed 64-bit integers.
    numbers = [int.from_bytes(hashlib.sha256(v.encode()).digest()[:7], "big") for v in values]
    maxima = torch.tensor(
        [int(error is not None), *numbers, *(-number for number in numbers)],
        dtype=torch.int64,
        device=device,
    )
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    has_failed, *both = maxima.tolist()
    largest = both[: len(values)]
    negatives = both[len(values) :]
    return not has_failed and all(a == -b for a, b in zip(largest, negatives, strict=True))


def _is_alone(group: dist.ProcessGroup | None) -> bool:
    # A job of one process has no gloo group, and NCCL takes no tensor of the host.
    return not dist.is_initialized() or dist.get_world_size(group) == 1


def _gather_reports(
    values: list[str], error: Exception | None, group: dist.ProcessGroup | None
) -> list[tuple[str, list[str]]]:
    """Every rank's error message, "" if it succeeded, and its values."""
    report = _message(error), [_shortened(value) for value in values]
    if _is_alone(group):
        return [report]
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, group=group)
    return reports


def _message(error: Exception | None) -> str:
    if error is None:
        return ""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # a user's error may fail to print itself; see `_printable`
        text = f"{type(error).__name__}, whose message cannot be printed"
    return _printable(text)[:_MESSAGE_CHARS]


def _printable(text: str) -> str:
    # Paths can contain bytes that are not UTF-8. If encoding them raised, this rank alone would
    # fail, and the others would wait for it forever.
    return text.encode(errors="backslashreplace").decode()


def _shortened(value: str) -> str:
    """The value itself if it is short, else its digest."""
    if len(value) <= _VALUE_CHARS:
        return value
    return f"sha256 {hashlib.sha256(value.encode()).hexdigest()[:16]}"


def _raise_difference(
    names: Sequence[str], error: Exception | None, reports: list[tuple[str, list[str]]]
) -> NoReturn:
    """Raise the same error on every rank, from all ranks' messages and values."""
    ranks_of: dict[str, list[int]] = {}
    for rank, (message, _) in enumerate(reports):
        ranks_of.setdefault(message, []).append(rank)
    num_good = len(ranks_of.pop("", []))
    if error is not None and len({message for message, _ in reports}) == 1:
        raise of_all_ranks(error)
    if ranks_of:
        failed = "; ".join(f"{_named(ranks)}: {message}" for message, ranks in ranks_of.items())
        text = f"{len(reports) - num_good} of {len(reports)} ranks failed: {failed}"
        raise of_all_ranks(ScheduleError(text)) from error
    for part, name in enumerate(names):
        _check_equal(name, [values[part] for _, values in reports])
    raise AssertionError("the ranks differ, but the values that they report do not")


def _named(ranks: list[int]) -> str:
    """Ranks as an error names them: all of a few, the first of many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED_RANKS]))}{more}"


def _check_equal(name: str, values: list[str]) -> None:
    (common, count), *others = Counter(values).most_common()
    if not others:
        return
    differing = [rank for rank, value in enumerate(values) if value != common]
    first = differing[0]
    raise of_all_ranks(
        ScheduleError(
            f"ranks {differing} differ from the other {count} in {name} (rank {first}: "
            f"{values[first]!r}, most: {common!r}); every rank must plan from the same lengths, "
            "rollouts, layout, budget, policy and cost model, and make the same call"
        )
    )
