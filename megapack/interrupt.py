"""Signals that end a run in good order: at a step's end, on all ranks, with a checkpoint.

A scheduler that takes the machines away says so before, with SIGTERM or with a signal of the job's
choice (Slurm's `--signal`), to all ranks or to some. A rank only takes note of it; the ranks agree
after each step.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interrupt:
    """Inside this context SIGTERM and SIGUSR1 are noted and do nothing else.

    Ctrl-C stays as it is: who presses it does not want to wait. So do all signals in a thread that
    is not the main one, where Python takes none.

    Args:
        saves: False, for a run without checkpoints: the signals end the process at once, also
            where the launcher had it started with them ignored.
    """

    def __init__(self, *, saves: bool) -> None:
        self._handler = self._note if saves else signal.SIG_DFL
        self._before: dict[signal.Signals, Any] = {}
        self.noted = False
        """Whether this rank was told to stop."""

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._handler) for one in SIGNALS}
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

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
