"""Signals that end a run cleanly: at a step's end, on all ranks, with a checkpoint.

Before a scheduler takes the machines away, it sends all or some ranks SIGTERM or a signal that the
job chose (Slurm's `--signal`). A rank only records the signal; the ranks agree after each step.
Before the first step there is nothing to save, and a rank ends at once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from types import FrameType
from typing import Any

from megapack.errors import RunInterrupted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

# Seconds that the watchdog has to report ranks that are gone before a process without checkpoints
# ends. Chosen by hand.
_LAST_REPORT_S = 1.0


class StoppedEarlyError(KeyboardInterrupt):
    """A signal came before the first step. Like Ctrl-C it ends whatever the rank is doing."""

    exit_code = RunInterrupted.exit_code

    def __init__(self) -> None:
        super().__init__(
            "a signal ended the run before its first step, with nothing to save: start it again"
        )


class Interrupt:
    """Inside this context SIGTERM and SIGUSR1 are recorded, and before `begin` end the rank.

    Ctrl-C is not changed: a user who presses it does not want to wait. Outside of the main thread
    nothing changes, since Python handles signals in the main thread only.

    Args:
        saves: whether the run writes checkpoints. If not, the signals end the process, even if the
            launcher started it with these signals ignored.

    Attributes:
        noted: whether this rank got a signal to stop.
        bytes: receives a byte per signal, also while the main thread is stuck; for the watchdog.
        is_watched: whether a watchdog reads them.
    """

    def __init__(self, *, saves: bool) -> None:
        self.saves = saves
        self.noted = False
        self.is_watched = False
        self._has_begun = False
        self._before: dict[signal.Signals, Any] = {}
        self._last_report = threading.Event()
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

    def __exit__(self, *error: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._before = {}
        if self.bytes is not None and self._writes is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self.bytes.close()
            self._writes.close()

    @property
    def ends_with(self) -> int | None:
        """The exit code of a process that cannot handle a signal; None if the signal waits for the
        step's end."""
        if not self.saves:
            return 128 + signal.SIGTERM
        return None if self._has_begun else RunInterrupted.exit_code

    def begin(self) -> None:
        """Called before each step: from now on a signal waits for the step's end.

        Raises:
            StoppedEarlyError: a signal came before the first step, and its error was lost, as in a
                callback of the compiler.
        """
        if self.noted and not self._has_begun:
            raise StoppedEarlyError
        self._has_begun = True

    def watchdog_is_done(self) -> None:
        """Called by the watchdog once it has checked the other ranks after a signal."""
        self._last_report.set()

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.noted
        self.noted = True
        if self.saves and not self._has_begun and is_first:
            raise StoppedEarlyError
        if not self.saves:
            if self.is_watched:
                self._last_report.wait(_LAST_REPORT_S)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
