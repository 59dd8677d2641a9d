"""No rank waits in silence: a thread on each rank that hears of failures while its rank is stuck.

    a rank raises, is killed or is stopped -> the board -> every rank's thread -> the same error

A rank that waits for another in a collective cannot be told there. Its watchdog is told through the
job's store, says so in the log, breaks NCCL's collectives, and where it was asked to, ends the
process. It also measures how long steps take and says where the rank is when one is late.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from megapack.board import Board, Failure
from megapack.interrupt import Interrupt
from megapack.loop_config import WatchdogConfig
from megapack.place import Place
from megapack.watch_peers import Peers

_LOG = logging.getLogger(__name__)

_TICK_S = 0.5
# One store answers all ranks, a few questions each in this time.
_RANKS_PER_TICK_S = 512
# What a rank that heard of a failure gets to come out of its collective by itself.
_GRACE_S = 2.0
_END_S = 8.0


class Watchdog:
    """Watches this process; made on all ranks of a job, which each keep one.

    Args:
        config: when steps are late.
        ends_process: end the process where its main thread does not come back from a failure.
        interrupt: tells it of signals that the main thread may be too stuck to take.
        board: in place of one on the default group's store.

    Attributes:
        place: where the rank is; its main thread keeps it up to date.
        failure: what ended the job, once this rank knows of one.
    """

    def __init__(
        self,
        config: WatchdogConfig | None = None,
        *,
        ends_process: bool = False,
        interrupt: Interrupt | None = None,
        board: Board | None = None,
    ) -> None:
        self.config, self.place = config or WatchdogConfig(), Place()
        self.failure: Failure | None = None
        self.board = board or _default_board()
        self.rank, self.world = (self.board.rank, self.board.world) if self.board else (0, 1)
        self._ends_process, self._interrupt = ends_process, interrupt
        if interrupt is not None:
            interrupt.is_watched = True
        self._tick_s = max(_TICK_S, self.world / _RANKS_PER_TICK_S)
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._num_expecting = 0
        self._began: float | None = None
        self._predicted_s: float | None = None
        self._logged_s = 0.0
        self._failed_at = self._terminated_at = float("inf")
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._is_deaf = self._is_broken = False
        self.peers = Peers(self.board)
        self._thread = threading.Thread(target=self._watch, name="megapack-watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Within the block every other rank is expected to be there."""
        self._num_expecting += 1
        try:
            yield
        finally:
            self._num_expecting -= 1

    @contextlib.contextmanager
    def timing(self, predicted_s: float | None = None) -> Iterator[None]:
        """Within the block the clock of a step runs; inside another such block this does
        nothing."""
        if self._began is not None:
            yield
            return
        self._predicted_s, self._logged_s, self._began = predicted_s, 0.0, time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def tell(self, failure: Failure) -> Failure:
        """Make a failure known to all ranks; returns the one that was told first."""
        with contextlib.suppress(Exception):  # the store may be gone with the rank that failed
            failure = failure if self.board is None else self.board.post(failure)
        self._heard_of(failure)
        return failure

    def raise_failure(self) -> None:
        """Raise what ended the job, if something did.

        Raises:
            RankError: the same on every rank.
        """
        if self.failure is not None:
            raise self.failure.error()

    def wait_until_heard(self, limit_s: float = 3.0) -> None:
        """Wait for the others to know of the failure: a launcher ends them once this rank has."""
        expected = self.world - len(self.failure.gone if self.failure else ())
        end = time.monotonic() + limit_s
        with contextlib.suppress(Exception):  # the store may be gone with the rank that failed
            while self.board is not None and self.board.num_heard() < expected:
                if time.monotonic() > end:
                    return
                time.sleep(0.05)

    def stop(self, failure: Failure | None = None) -> None:
        """End, in good order or with a failure that the others are told."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(2 * self._tick_s)
        if self.board is None:
            return
        with contextlib.suppress(Exception):  # the store may be gone
            self.board.leave() if failure is None else self.board.post(failure)
        self.board.close()

    def _heard_of(self, failure: Failure) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure, self._failed_at = failure, time.monotonic()
        _LOG.warning("%s", failure.text)
        with contextlib.suppress(Exception):
            if self.board is not None:
                self.board.hear()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._wait()
            self._end_with_launcher()
            if self.failure is None and not self._stopping.is_set():
                self._listen()
            if self.failure is None and not self._stopping.is_set():
                self._look()
            self._end_if_stuck()

    def _wait(self) -> None:
        signals = None if self._interrupt is None else self._interrupt.bytes
        if signals is None or self._terminated_at < float("inf"):
            self._stopping.wait(self._tick_s)
            return
        try:
            signals.settimeout(self._tick_s)
            if signal.SIGTERM in signals.recv(64):
                self._terminated_at = min(self._terminated_at, time.monotonic())
        except TimeoutError:
            pass
        except OSError:  # closed: who interrupts has ended before
            self._stopping.wait(self._tick_s)

    def _end_with_launcher(self) -> None:
        """torchrun that was killed leaves ranks that would train on beside a job that resumes."""
        if self._launcher in (None, os.getppid()) or self._interrupt is None:
            return
        self._launcher = None
        _LOG.error("rank %d: torchrun is gone, which ends this rank as SIGTERM does", self.rank)
        os.kill(os.getpid(), signal.SIGTERM)

    def _listen(self) -> None:
        try:
            if self.board is not None:
                self.board.beat()
                found = self.board.failure()
                if found is not None:
                    self._heard_of(found)
        except Exception as error:  # the store's host is gone, and most often the job with it
            if self._num_expecting and not self._is_deaf:
                self._is_deaf = True
                _LOG.warning("the watchdog hears nothing of other ranks any more (%s)", error)

    def _look(self) -> None:
        began = self._began
        gone = self.peers.look(in_step=began is not None) if self._num_expecting else {}
        if gone:
            self.tell(self.gone(gone))
        elif began is not None:
            self._look_at_clock(time.monotonic() - began)

    def gone(self, ranks: dict[int, str]) -> Failure:
        """The failure that processes are gone, with what is known of each."""
        known = "; ".join(ranks.values())
        text = f"{known}; rank {self.rank} noticed it{self.place.within}"
        return Failure(text=text, gone=tuple(ranks))

    def _look_at_clock(self, elapsed_s: float) -> None:
        config, predicted_s = self.config, self._predicted_s
        limit_s = max(config.slow_after_s, config.slow_factor * (predicted_s or 0.0))
        predicted = "" if predicted_s is None else f", {predicted_s:.1f} s were predicted"
        late = f"has run for {elapsed_s:.0f} s{predicted}"
        silent = "".join(f"; {text}" for text in self.peers.silent.values())
        if elapsed_s > max(limit_s, 2 * self._logged_s):
            self._logged_s = elapsed_s
            _LOG.error("rank %d: %s %s%s", self.rank, self.place, late, silent)
        if config.abort_after_s is not None and elapsed_s > config.abort_after_s:
            text = (
                f"{self.place} on rank {self.rank} {late}, which is above watchdog.abort_after_s="
                f"{config.abort_after_s:g}{silent}"
            )
            self.tell(Failure(text=text, gone=tuple(self.peers.silent)))

    def _end_if_stuck(self) -> None:
        now = time.monotonic()
        failed_s, terminated_s = now - self._failed_at, now - self._terminated_at
        if terminated_s >= 0 and self._interrupt is not None:
            self._interrupt.watchdog_is_done()
        if failed_s > _GRACE_S and self._num_expecting and not self._is_broken:
            self._is_broken = True
            abort_nccl()
        # A launcher says SIGTERM to those who are left, and SIGKILL only much later.
        if self._ends_process and failed_s > (_GRACE_S if terminated_s >= 0 else _END_S):
            assert self.failure is not None
            print(f"megapack: rank {self.rank}: {self.failure.text}", file=sys.stderr, flush=True)
            os._exit(1)
        is_told_to_end = self._interrupt is not None and not self._interrupt.saves
        if is_told_to_end and self._failed_at == float("inf") and terminated_s > _GRACE_S:
            os._exit(128 + signal.SIGTERM)


def _default_board() -> Board | None:
    if dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    return Board(store, dist.get_rank(), dist.get_world_size())


def abort_nccl() -> None:
    """Break the collectives in which the main thread may be stuck; gloo has no such call."""
    # "nccl", or "cpu:gloo,cuda:nccl".
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group()
