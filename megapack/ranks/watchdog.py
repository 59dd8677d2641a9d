"""No rank waits without an error: a thread on each rank learns of failures while its rank is stuck.

    a rank raises, is killed or is stopped -> the board -> every rank's thread -> the same error

A rank that waits in a collective receives no messages there. Its watchdog learns of a failure from
the board (see `board`), logs it, aborts NCCL's collectives, and ends the process if it was made
with `ends_process`. It also times each step and logs what the rank is doing when a step is late.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from megapack.ranks.board import Board, Failure, Process
from megapack.ranks.interrupt import SIGNALS, Interrupt
from megapack.ranks.place import Place
from megapack.ranks.watchdog_config import WatchdogConfig

logger = logging.getLogger(__name__)

# All limits below are chosen by hand.
# Seconds between two rounds of the watchdog's thread, in small jobs.
_TICK_S = 0.5
# In larger jobs rounds are rarer, since one store answers a few questions of each rank per round:
# 1,024 ranks have a round every 1,024 / 512 = 2 s.
_RANKS_PER_TICK_S = 512
# Seconds that the main thread has, once a failure is known, to leave its collective by itself.
# After that, NCCL's collectives are aborted.
_GRACE_S = 2.0
# Seconds after a failure until a process that is still stuck is ended (`ends_process`).
_END_S = 8.0
# Seconds without a beat after which a rank of another host counts as silent. A rank that compiles,
# or holds Python's lock in another way, sends no beat for seconds.
_SILENT_S = 15.0
# The list of this host's processes is read from the board every 20 checks: every 10 s.
_CHECKS_PER_REFRESH = 20


class Watchdog:
    """Watches this process. Every rank of a job makes one at the same time.

    Args:
        config: the limits above which a step is late.
        ends_process: end the process if its main thread does not return after a failure.
        interrupt: passes signals on, also while the main thread is stuck and cannot handle them.
        board: None makes a board on the default group's store.

    Attributes:
        place: what the rank is doing; its main thread keeps it up to date.
        failure: what ended the job, once this rank knows of it.
    """

    def __init__(
        self,
        config: WatchdogConfig | None = None,
        *,
        ends_process: bool = False,
        interrupt: Interrupt | None = None,
        board: Board | None = None,
    ) -> None:
        self.config = config or WatchdogConfig()
        self.place = Place()
        self.failure: Failure | None = None
        self.board = board or _default_board()
        self.rank = self.board.rank if self.board else 0
        self.world = self.board.world if self.board else 1
        self.peers = Peers(self.board)
        self._ends_process = ends_process
        self._interrupt = interrupt
        if interrupt is not None:
            interrupt.is_watched = True
        self._tick_s = max(_TICK_S, self.world / _RANKS_PER_TICK_S)
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._num_expecting = 0
        self._began: float | None = None
        self._predicted_s: float | None = None
        self._logged_s = 0.0
        self._failed_at = float("inf")
        self._terminated_at = float("inf")
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._has_logged_lost_store = False
        self._has_aborted_nccl = False
        self._thread = threading.Thread(target=self._watch, name="megapack-watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watching(self, predicted_s: float | None = None, *, timed: bool = True) -> Iterator[None]:
        """Within the block, every other rank is expected to be alive.

        Args:
            predicted_s: seconds that the block should take; None if unknown.
            timed: time the block as one step, unless it is inside another such block.
        """
        times = timed and self._began is None
        self._num_expecting += 1
        if times:
            self._predicted_s = predicted_s
            self._logged_s = 0.0
            self._began = time.monotonic()
        try:
            yield
        finally:
            self._num_expecting -= 1
            if times:
                self._began = None

    def report(self, failure: Failure) -> Failure:
        """Report a failure to all ranks; returns the first one that any rank reported."""
        with contextlib.suppress(Exception):  # the store may be gone with the rank that failed
            failure = failure if self.board is None else self.board.post(failure)
        self._note_failure(failure)
        return failure

    def raise_failure(self) -> None:
        """Raise the error of the failure that ended the job, if there is one.

        Raises:
            RankError: the same on every rank.
        """
        if self.failure is not None:
            raise self.failure.error()

    def wait_until_acknowledged(self, limit_s: float = 3.0) -> None:
        """Wait until the other ranks know of the failure.

        Once this process ends, a launcher ends the others too, before they could report it.
        """
        expected = self.world - len(self.failure.gone if self.failure else ())
        end = time.monotonic() + limit_s
        with contextlib.suppress(Exception):  # the store may be gone with the rank that failed
            while self.board is not None and self.board.num_acknowledged() < expected:
                if time.monotonic() > end:
                    return
                time.sleep(0.05)

    def stop(self, failure: Failure | None = None) -> None:
        """End the thread, and report to the other ranks that this one ends normally or failed."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(2 * self._tick_s)
        if self.board is None:
            return
        with contextlib.suppress(Exception):  # the store may be gone
            self.board.leave() if failure is None else self.board.post(failure)
        self.board.close()

    def gone_failure(self, ranks: dict[int, str]) -> Failure:
        """The failure of a job in which ranks are gone.

        Args:
            ranks: the ranks that are gone, and what is known of each.
        """
        known = "; ".join(ranks.values())
        text = f"{known}; rank {self.rank} noticed it{self.place.within}"
        return Failure(text=text, gone=tuple(ranks))

    def _note_failure(self, failure: Failure) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            self._failed_at = time.monotonic()
        logger.warning("%s", failure.text)
        with contextlib.suppress(Exception):
            if self.board is not None:
                self.board.acknowledge()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._wait()
            self._end_with_launcher()
            if self.failure is None and not self._stopping.is_set():
                self._read_board()
            if self.failure is None and not self._stopping.is_set():
                self._check_ranks_and_clock()
            self._end_if_stuck()

    def _wait(self) -> None:
        signals = None if self._interrupt is None else self._interrupt.bytes
        if signals is None or self._terminated_at < float("inf"):
            self._stopping.wait(self._tick_s)
            return
        try:
            signals.settimeout(self._tick_s)
            if set(SIGNALS) & set(signals.recv(64)):
                self._terminated_at = min(self._terminated_at, time.monotonic())
        except TimeoutError:
            pass
        except OSError:  # closed: the `Interrupt` block has ended
            self._stopping.wait(self._tick_s)

    def _end_with_launcher(self) -> None:
        """End this rank if torchrun is gone: it would train on while a new job resumes the run."""
        if self._launcher in (None, os.getppid()) or self._interrupt is None:
            return
        self._launcher = None
        logger.error("rank %d: torchrun is gone, so this rank ends as on SIGTERM", self.rank)
        os.kill(os.getpid(), signal.SIGTERM)

    def _read_board(self) -> None:
        try:
            if self.board is not None:
                failure = self.board.beat_and_read()
                if failure is not None:
                    self._note_failure(failure)
        except Exception as error:  # the store's host is gone, and usually the job with it
            if self._num_expecting and not self._has_logged_lost_store:
                self._has_logged_lost_store = True
                logger.warning(
                    "the watchdog has lost the store, its link to other ranks (%s)", error
                )

    def _check_ranks_and_clock(self) -> None:
        # The time first: a block that ends between the two is not late.
        now, began = time.monotonic(), self._began
        gone = self.peers.check(in_step=began is not None) if self._num_expecting else {}
        if gone:
            self.report(self.gone_failure(gone))
        elif began is not None:
            self._check_clock(now - began)

    def _check_clock(self, elapsed_s: float) -> None:
        config = self.config
        predicted_s = self._predicted_s
        limit_s = max(config.slow_after_s, config.slow_factor * (predicted_s or 0.0))
        predicted = "" if predicted_s is None else f", {predicted_s:.1f} s were predicted"
        late = f"has run for {elapsed_s:.0f} s{predicted}"
        silent = "".join(f"; {text}" for text in self.peers.silent.values())
        if elapsed_s > max(limit_s, 2 * self._logged_s):
            self._logged_s = elapsed_s
            logger.error("rank %d: %s %s%s", self.rank, self.place, late, silent)
        if config.abort_after_s is not None and elapsed_s > config.abort_after_s:
            text = (
                f"{self.place} on rank {self.rank} {late}, which is above watchdog.abort_after_s="
                f"{config.abort_after_s:g}{silent}"
            )
            self.report(Failure(text=text, gone=tuple(self.peers.silent)))

    def _end_if_stuck(self) -> None:
        now = time.monotonic()
        failed_s = now - self._failed_at
        terminated_s = now - self._terminated_at
        if terminated_s >= 0 and self._interrupt is not None:
            self._interrupt.watchdog_is_done()
        if failed_s > _GRACE_S and self._num_expecting and not self._has_aborted_nccl:
            self._has_aborted_nccl = True
            abort_nccl()
        # After one rank has ended, a launcher sends the others SIGTERM, and SIGKILL much later.
        if self._ends_process and failed_s > (_GRACE_S if terminated_s >= 0 else _END_S):
            assert self.failure is not None
            print(f"megapack: rank {self.rank}: {self.failure.text}", file=sys.stderr, flush=True)
            os._exit(1)
        code = None if self._interrupt is None else self._interrupt.ends_with
        if code is not None and self._failed_at == float("inf") and terminated_s > _GRACE_S:
            os._exit(code)


class Peers:
    """Which of the other ranks are alive, as this rank sees them.

    Ranks on the same host are looked up in the system's process table. Among ranks on other hosts,
    each rank watches only the next one, by its beats on the board. So the store's load grows with
    the number of ranks, not with its square.

    Attributes:
        silent: ranks that are stopped or send no beats, and what is known of each.
    """

    def __init__(self, board: Board | None) -> None:
        self._board = board
        self._host = socket.gethostname()
        self.silent: dict[int, str] = {}
        self._processes: list[Process] = []
        self._num_checks = 0
        self._last_beat = (0, time.monotonic())

    def check(self, *, in_step: bool) -> dict[int, str]:
        """Ranks of this host whose processes are gone, and what is known of each.

        This also updates `silent`. A rank is logged when it becomes silent.

        Args:
            in_step: whether this rank is in a step; no rank ends normally before a step's end.
        """
        if self._board is None:
            return {}
        if self._num_checks % _CHECKS_PER_REFRESH == 0:
            self._refresh()
        self._num_checks += 1
        states = {process: process.state() for process in self._processes}
        stopped = {p.rank: self._describe(p, "stopped") for p in states if states[p] == "stopped"}
        self._set_silent({**stopped, **self._silent_next()})
        gone = [process for process in states if states[process] == "gone"]
        return {p.rank: self._describe(p, "gone") for p in gone if not self._left(p.rank, in_step)}

    def ended(self) -> dict[int, str]:
        """Ranks of this host whose processes are gone, also those that ended normally."""
        self._refresh()
        return {p.rank: self._describe(p, "gone") for p in self._processes if p.state() == "gone"}

    def _refresh(self) -> None:
        # The store may be gone with the rank that failed; then keep the last known processes.
        with contextlib.suppress(Exception):
            self._processes = self._board.processes_on_host() if self._board else []

    def _left(self, rank: int, in_step: bool) -> bool:
        assert self._board is not None
        try:
            return self._board.has_left(rank)
        except Exception:  # the store is gone, with a rank that failed or after the last step
            return not in_step

    def _describe(self, process: Process, state: str) -> str:
        why = {
            "gone": "is gone: it was killed or ended without reporting an error",
            "stopped": "is stopped (SIGSTOP, or a debugger)",
        }
        return f"rank {process.rank} (process {process.pid} on {self._host}) {why[state]}"

    def _silent_next(self) -> dict[int, str]:
        """The next rank, if it is on another host and sends no beats."""
        board = self._board
        assert board is not None
        rank = (board.rank + 1) % board.world
        if any(process.rank == rank for process in self._processes):
            return {}
        try:
            beats = board.num_beats(rank)
            has_left = board.has_left(rank)
        except Exception:  # without the store, nothing is known about other hosts
            return {}
        now = time.monotonic()
        if beats != self._last_beat[0]:
            self._last_beat = (beats, now)
        silent_s = now - self._last_beat[1]
        if silent_s < _SILENT_S or has_left:
            return {}
        return {rank: f"rank {rank} has shown no sign of life for {silent_s:.0f} s"}

    def _set_silent(self, silent: dict[int, str]) -> None:
        for rank, text in silent.items():
            if rank not in self.silent:
                logger.error("%s", text)
        self.silent = silent


def _default_board() -> Board | None:
    if dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    return Board(store, dist.get_rank(), dist.get_world_size())


def abort_nccl() -> None:
    """Abort the collectives in which the main thread may be stuck; gloo cannot abort them."""
    # "nccl", or "cpu:gloo,cuda:nccl".
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group()
