"""A lock that one process of a machine holds, and what the others say while they wait."""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

# Seconds between two looks at the lock, and between two lines about it.
_POLL_S = 0.05
_LINE_S = 10.0
# A process goes on without the lock after this time: the holder may be stopped for good. The kernel
# that takes longest takes 6 s on an idle core, and 60 s on a machine with ten busy processes per
# core.
_PATIENCE_S = 300.0


class MachineLock:
    """A lock file, which the system unlocks when its holder ends, however it ends.

    It is a hint, not a guard: a process goes on without it where the file system has no locks, the
    folder cannot be written, or the holder takes minutes.

    Args:
        path: the lock file.
        purpose: what the holder does, as in "compiles the planner".

    Attributes:
        waited_s: seconds that this process has waited, over all its waits.
    """

    def __init__(self, path: Path, purpose: str) -> None:
        self._path = path
        self._purpose = purpose
        self._file: IO[str] | None = None
        self._next_line_s = _LINE_S
        self._has_given_up = fcntl is None
        self.waited_s = 0.0

    def acquire(self) -> None:
        """Wait for the lock; does nothing if this process has it."""
        if self._has_given_up or self._file is not None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115
            began = time.monotonic()
            waited_s = self.waited_s
            while not self._try():
                self.waited_s = waited_s + time.monotonic() - began
                if self.waited_s - waited_s > _PATIENCE_S:
                    logger.warning("%s; this process no longer waits for it", self._holder())
                    self._has_given_up = True
                    self.release()
                    return
                self._say()
                time.sleep(_POLL_S)
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._file.flush()
        except OSError:
            self.release()

    def release(self) -> None:
        """Let the next process have it."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
        except BlockingIOError:
            return False
        return True

    def _say(self) -> None:
        if self.waited_s >= self._next_line_s:
            self._next_line_s = self.waited_s + _LINE_S
            logger.warning("waiting for %s (%.0f s so far)", self._holder(), self.waited_s)

    def _holder(self) -> str:
        try:
            holder = self._path.read_text(encoding="utf-8")
        except OSError:
            holder = ""
        return f"{holder or 'another process'}, which {self._purpose}"
