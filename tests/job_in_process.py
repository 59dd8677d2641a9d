"""Several ranks of a job in one process, without Megatron, and a clock that tests set."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megapack.ranks.board import Board

LIMIT_S = 30.0
"""Limit for events that take milliseconds on an idle machine."""


def until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds that another thread or process makes true."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, f"it did not happen in {LIMIT_S:g} s"
        time.sleep(0.005)


class Clock:
    """Replaces the module `time` in one module."""

    def __init__(self) -> None:
        self.now = 100.0
        self._num_reads = 0

    def monotonic(self) -> float:
        self._num_reads += 1
        return self.now

    def wait_for_reads(self, count: int = 2) -> None:
        """Wait until other threads have read the clock; at the second read, the first was used."""
        wanted = self._num_reads + count
        until(lambda: self._num_reads >= wanted)

    sleep = staticmethod(time.sleep)


@contextmanager
def boards(world: int, store: Any = None) -> Iterator[list[Board]]:
    """A board per rank, on one store."""
    store = dist.HashStore() if store is None else store
    made = [Board(store, rank, world) for rank in range(world)]
    yield made
    for board in made:
        board.close()


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps; it replaces a rank's process."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def pid_is(pid: int) -> Iterator[None]:
    """Within the block, `os.getpid` returns another pid."""
    original = os.getpid
    os.getpid = lambda: pid
    try:
        yield
    finally:
        os.getpid = original


@contextmanager
def job_of_one() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
