"""What a process shares with the other ranks of its job beside Megatron's groups."""

from __future__ import annotations

import atexit
import sys
from dataclasses import dataclass

import torch.distributed as dist

from megapack.board import Failure
from megapack.consensus import Agreements
from megapack.watchdog import Watchdog


@dataclass(frozen=True)
class Job:
    """The ranks of `torch.distributed`'s default group."""

    watchdog: Watchdog
    agreements: Agreements

    def stop(self, failure: Failure | None = None) -> None:
        """End its threads, in good order or with a failure that the others are told."""
        self.watchdog.stop(failure)
        self.agreements.stop()


_joined: list[tuple[dist.ProcessGroup, Job]] = []


def current_job() -> Job:
    """The job that this process is in, joined at the first call: a collective of all ranks."""
    default = dist.distributed_c10d._get_default_group()
    if not _joined or _joined[0][0] is not default:
        return join_job(Watchdog())
    return _joined[0][1]


def join_job(watchdog: Watchdog) -> Job:
    """Join with a watchdog of one's own, before anything asks for the job. A collective."""
    leave_job()
    job = Job(watchdog, Agreements(watchdog))
    _joined.append((dist.distributed_c10d._get_default_group(), job))
    return job


def leave_job() -> None:
    """End in good order; where no job was joined this does nothing."""
    while _joined:
        _joined.pop()[1].stop()


def _leave_at_exit() -> None:
    """An error that ends a script outside of a step is one that other ranks would wait for."""
    error = getattr(sys, "last_value", None)
    while error is not None and _joined:
        _, job = _joined.pop()
        rank = job.watchdog.rank
        job.stop(Failure.of(f"rank {rank} ended with", error, gone=(rank,)))
    leave_job()


atexit.register(_leave_at_exit)
