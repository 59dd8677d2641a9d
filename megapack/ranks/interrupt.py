"""Signals that end a run in good order: at a step's end, on all ranks, with a checkpoint.

A scheduler that takes the machines away says so before, with SIGTERM or with a signal of the job's
choice (Slurm's `--signal`), to all ranks or to some. A rank only takes note of it; the ranks agree
after each step.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


# What a watchdog gets to say who is gone, before a process that does not save ends.
_LAST_WORDS_S = 1.0


class Interrupt:
    """Inside this context SIGTERM and SIGUSR1 are noted and do nothing else.

    Ctrl-C stays as it is: who presses it does not want to wait. So do all signals in a thread that
    is not the main one, where Python takes none.

    Args:
        saves: False, for a run without checkpoints: the signals end the process, also where the
            launcher had it started with them ignored.

    Attributes:
        noted: whether this rank was told to stop.
        bytes: gets a byte per signal, also while the main thread is stuck; for the watchdog.
        is_watched: whether a watchdog reads them.
    """

    def __init__(self, *, saves: bool) -> None:
        self.saves, self.noted, self.is_watched = saves, False, False
        self._before: dict[signal.Signals, Any] = {}
        self._said_last = threading.Event()
        self._wakeup_before = -1
        self.bytes: socket.socket | None = None
        self._writes: socket.socket | None = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self.bytes, self._writes = socket.socketpair()
            self._writes.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(
                self._writes.fileno(), warn_on_full_buffer=False
            )
            self._before = {one: signal.signal(one, self._note) for one in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._before = {}
        if self.bytes is not None and self._writes is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self.bytes.close()
            self._writes.close()

    def watchdog_is_done(self) -> None:
        """Called by a watchdog that has looked at the others after a signal."""
        self._said_last.set()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
        if not self.saves:
            if self.is_watched:
                self._said_last.wait(_LAST_WORDS_S)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
