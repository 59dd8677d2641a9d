"""A small disk to fill up: a file system in memory, mounted for one test."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = 4096
"""Bytes that this disk allocates to a file at a time."""


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """An empty disk of this size in a new folder; skips the test if it cannot be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, *, but_bytes: int = 0) -> Path:
    """Fill the disk except for `but_bytes`; returns the file that fills it."""
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - but_bytes))
    return ballast
