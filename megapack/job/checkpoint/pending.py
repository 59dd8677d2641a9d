"""A checkpoint whose files are being written while training goes on."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from pathlib import Path

from megapack.job.checkpoint import folders
from megapack.job.checkpoint.folders import Manifest
from megapack.job.checkpoint.writer import StateWriter
from megapack.ranks.threads import run_on_daemon

# Seconds that a run which ends with an error waits for the tensor that is being written. At 1 GB/s
# a tensor of 4 GB takes 4. Chosen by hand.
_ABANDON_S = 8.0


class PendingSave:
    """This rank's part of a save in progress; its thread ends with the work.

    Args:
        path: the checkpoint's final folder.
        manifest: what its manifest will say.
        writer: the tensors' writer.
        work: writes this rank's files, without communication.
    """

    def __init__(
        self, path: Path, manifest: Manifest, writer: StateWriter, work: Callable[[], None]
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.writer = writer
        self.write_s = 0.0
        self._done = run_on_daemon("megapack-checkpoint", lambda: self._timed(work))

    @property
    def part(self) -> Path:
        """The folder that the files are written into."""
        return folders.part_path(self.path)

    @property
    def is_writing(self) -> bool:
        return not self._done.done()

    @property
    def has_failed(self) -> bool:
        return self._done.done() and self._done.exception() is not None

    def wait(self) -> None:
        """Wait until this rank's files are on the disk; raises the error of writing them."""
        self._done.result()

    def abandon(self) -> None:
        """Stop writing after the tensor in progress."""
        self.writer.abandon()
        # On a file system that hangs, the thread is left behind.
        concurrent.futures.wait([self._done], timeout=_ABANDON_S)

    def _timed(self, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            work()
        finally:
            self.write_s = time.perf_counter() - started
