"""Who of the other ranks still lives.

Processes of the same host are looked up in the system's table. Of other hosts each rank watches
one, the next, by the beats on the board: so the store is asked as often as there are ranks.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time

from megapack.board import Board, Process

_LOG = logging.getLogger(__name__)

# A rank that compiles, or holds Python's lock in some other way, is silent for seconds.
_SILENT_S = 15.0
_REFRESH_LOOKS = 20


class Peers:
    """The other ranks, as this one sees them.

    Attributes:
        silent: ranks that are stopped or show no sign of life, and what is known of them.
    """

    def __init__(self, board: Board | None) -> None:
        self._board, self._host = board, socket.gethostname()
        self.silent: dict[int, str] = {}
        self._processes: list[Process] = []
        self._num_looks = 0
        self._last_beat = (0, time.monotonic())

    def look(self, *, in_step: bool) -> dict[int, str]:
        """Ranks of this host whose processes are gone, and what is known of them.

        Ranks that are silent are logged once, and again when they came back in between.

        Args:
            in_step: this rank is in a step, before whose end no rank leaves in good order.
        """
        if self._board is None:
            return {}
        if self._num_looks % _REFRESH_LOOKS == 0:
            self._refresh()
        self._num_looks += 1
        states = {process: process.state() for process in self._processes}
        stopped = {p.rank: self._name(p, "stopped") for p in states if states[p] == "stopped"}
        self._note_silent({**stopped, **self._silent_next()})
        gone = [process for process in states if states[process] == "gone"]
        return {p.rank: self._name(p, "gone") for p in gone if not self._left(p.rank, in_step)}

    def ended(self) -> dict[int, str]:
        """Ranks of this host that are gone, in good order or not."""
        self._refresh()
        return {p.rank: self._name(p, "gone") for p in self._processes if p.state() == "gone"}

    def _refresh(self) -> None:
        # The store may be gone with the rank that is looked for: what is known of it stays.
        with contextlib.suppress(Exception):
            self._processes = self._board.processes_on_host() if self._board else []

    def _left(self, rank: int, in_step: bool) -> bool:
        assert self._board is not None
        try:
            return self._board.has_left(rank)
        except Exception:  # the store is gone: with a rank that failed, or after the last step
            return not in_step

    def _name(self, process: Process, state: str) -> str:
        why = {
            "gone": "is gone: it was killed, or ended without a word",
            "stopped": "is stopped (SIGSTOP, or a debugger)",
        }
        return f"rank {process.rank} (process {process.pid} on {self._host}) {why[state]}"

    def _silent_next(self) -> dict[int, str]:
        """The next rank, where it is on another host and does not beat."""
        board = self._board
        assert board is not None
        rank = (board.rank + 1) % board.world
        if any(process.rank == rank for process in self._processes):
            return {}
        try:
            (beats,), has_left = board.beats([rank]), board.has_left(rank)
        except Exception:  # without the store nothing is known of other hosts
            return {}
        now = time.monotonic()
        if beats != self._last_beat[0]:
            self._last_beat = (beats, now)
        silent_s = now - self._last_beat[1]
        if silent_s < _SILENT_S or has_left:
            return {}
        return {rank: f"rank {rank} shows no sign of life since {silent_s:.0f} s"}

    def _note_silent(self, silent: dict[int, str]) -> None:
        for rank, text in silent.items():
            if rank not in self.silent:
                _LOG.error("%s", text)
        self.silent = silent
