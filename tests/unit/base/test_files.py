"""Files are written atomically, through links and into devices; reads do not block on a pipe."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path

import pytest

from megapack.base import files
from megapack.base.files import read_whole, write_whole

pytestmark = pytest.mark.unit


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write_whole(tmp_path / "a", "old")

    def fail(handle: int) -> None:
        raise error

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(type(error)):
        write_whole(tmp_path / "a", "new")
    assert (names(tmp_path), read_whole(tmp_path / "a")) == (["a"], b"old")


def test_a_new_file_is_synced_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def record(handle: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, names(tmp_path)))

    monkeypatch.setattr(files.os, "fsync", record)
    write_whole(tmp_path / "a", "text")
    (part, there), folder = synced
    assert (part[:2], part[-5:], there) == ("a.", ".part", [part])
    assert folder == (tmp_path.name, ["a"])


def test_a_link_is_kept_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/a")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "there") == ["a"]
    assert read_whole(tmp_path / "link") == b"text"


def test_a_pipe_is_read_to_its_end_or_empty_without_a_writer(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_whole(pipe) == b""
    with pytest.raises(OSError, match="No such device"):
        write_whole(pipe, "text")
    # 1 MiB is more than a pipe buffers, so the writer has to wait for the reader.
    text = "x" * (1 << 20)
    read_end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(read_end, True)
    writer = threading.Thread(target=write_whole, args=(pipe, text))
    writer.start()
    select.select([read_end], [], [], 10)
    with open(read_end, "rb") as file:
        assert len(file.read()) == len(text)
    writer.join(timeout=10)
    assert not writer.is_alive()
