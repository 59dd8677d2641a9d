"""A crash at any system call of writing a checkpoint loses no complete checkpoint."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megapack.base.files import write_whole
from megapack.job.checkpoint import folders
from tests.unit.job.checkpoint.test_checkpoint_folders import manifest

pytestmark = pytest.mark.unit

# Calls of `os` that change the disk or sync it. pathlib and shutil use them too.
CALLS = ("open", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "remove")
KEPT = 2
TENSORS = b"x" * 100


class Crash(BaseException):
    """Stands in for the end of the process; no further call is made."""


class Disk:
    """Counts system calls and raises Crash from one of them on.

    Args:
        crash_at: number of the first call that is not made, from 1; None: no crash.
    """

    def __init__(self, crash_at: int | None) -> None:
        self.crash_at = crash_at
        self.made: list[tuple[str, str]] = []

    def call(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count(name, args[0])
            return work(*args, **kwargs)

        return counted

    def count(self, name: str, target: Any) -> None:
        self.made.append((name, _path(target)))
        if self.crash_at is not None and len(self.made) >= self.crash_at:
            raise Crash

    def open(self, file: Any, *args: Any, **kwargs: Any) -> Any:
        opened = REAL_OPEN(file, *args, **kwargs)
        if not opened.writable():
            return opened
        try:
            # Counted after the call: opening for writing has already emptied the file.
            self.count("open", file)
        except Crash:
            opened.close()
            raise
        # A crash while writing leaves half of the content on the disk.
        write = opened.write

        def half_first(content: Any) -> Any:
            write(content[: len(content) // 2])
            opened.flush()
            self.count("write", file)
            return write(content[len(content) // 2 :])

        opened.write = half_first
        return opened


REAL_OPEN = io.open


def _path(target: Any) -> str:
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)


@contextmanager
def crashing(monkeypatch: pytest.MonkeyPatch, crash_at: int | None) -> Iterator[Disk]:
    """Within the block, system calls go through a `Disk`; Crash is caught at its end."""
    disk = Disk(crash_at)
    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, disk.call(name, getattr(os, name)))
        for module in (io, builtins):
            patch.setattr(module, "open", disk.open)
        with suppress(Crash):
            yield disk


def save(folder: Path, num_steps: int) -> None:
    """Save as a run does: the `.part` folder, tensors, manifest, and removal of old ones."""
    part = folders.open_part(folders.checkpoint_path(folder, num_steps))
    for name in ("state/tensors", "rng/rank0.pt"):
        (part / name).write_bytes(TENSORS)
    folders.finish(part, manifest(num_steps))
    folders.thin_out(folder, KEPT)


def save_third(folder: Path) -> None:
    """Save after the two existing checkpoints."""
    save(folder, 9)


def go_back(folder: Path) -> None:
    """Resume after 3 steps and save after 5."""
    folders.drop_after(folder, 3)
    save(folder, 5)


def prepared(folder: Path) -> Path:
    """A run's checkpoints after 3 and 6 steps, and a partial third from an earlier crash."""
    for num_steps in (3, 6):
        save(folder, num_steps)
    folders.open_part(folders.checkpoint_path(folder, 7))
    return folder


def complete(folder: Path) -> dict[int, folders.Checkpoint]:
    """All checkpoints under a final name by their steps; asserts that each is complete."""
    checkpoints = [folders.read_checkpoint(path) for path in folder.glob("step-????????")]
    assert all((one.path / "state/tensors").read_bytes() == TENSORS for one in checkpoints)
    return {one.manifest.position.num_steps: one for one in checkpoints}


@pytest.mark.parametrize(("work", "latest"), [(save_third, {6, 9}), (go_back, {6, 3, 5})])
def test_a_crash_at_any_call_loses_no_complete_checkpoint(
    work: Callable[[Path], None],
    latest: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = set()
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    for crash_at in range(1, 1000):
        folder = prepared(tmp_path / str(crash_at))
        with crashing(monkeypatch, crash_at) as disk:
            work(folder)
        last = max(complete(folder))
        seen.add(last)
        if len(disk.made) < crash_at:
            break
        # The run that resumes from there removes everything that the crash left.
        folders.drop_after(folder, last)
        save(folder, last + 1)
        assert max(complete(folder)) == last + 1
        assert len(list(folder.iterdir())) == KEPT
    assert seen == latest
    assert crash_at > 30


def test_everything_is_synced_before_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "run" / "checkpoints"
    with crashing(monkeypatch, None) as disk:
        save(folder, 9)
    part = folder / "step-00000009.part"
    renamed = disk.made.index(("rename", str(part)))
    synced = {path for name, path in disk.made[:renamed] if name == "fsync"}
    inside = ("", "/state", "/rng", "/state/tensors", "/rng/rank0.pt", f"/{folders.MANIFEST}")
    assert {f"{part}{name}" for name in inside} <= synced
    # The parent folders are new too. The entry of each is in the folder above it.
    assert {str(folder.parent), str(folder.parent.parent), str(tmp_path)} <= synced
    last_write = max(i for i, (name, _) in enumerate(disk.made) if name == "write")
    syncs = [i for i, call in enumerate(disk.made) if call == ("fsync", str(part))]
    assert last_write < syncs[0] < renamed
    assert ("fsync", str(folder)) in disk.made[renamed:]


def test_a_crash_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    seen = []
    for crash_at in range(1, 100):
        path.write_text("old")
        with crashing(monkeypatch, crash_at) as disk:
            write_whole(path, "new")
        seen.append(path.read_text())
        if len(disk.made) < crash_at:
            break
    assert set(seen) == {"old", "new"}
    assert len(seen) > 4
