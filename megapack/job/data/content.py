"""What data files hold, as a digest; it is remembered beside them until they change.

A digest tells content apart, whatever a file's times say: `cp -p`, `rsync -t` and `tar -x` keep
them. It takes a read of the files, so it is stored under what is cheap to know of them, their
state. A state that is not known costs a read, and gives the same digest if the content is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from megapack.base.files import read_text, write_whole
from megapack.errors import DataError
from megapack.job.data.files import unreadable

SUFFIX = ".megapack-content"

# Of a file's state: at most so many pieces of this size, spread evenly, and fewer of many files.
_PIECES = 16
_PIECES_OF_ALL = 512
_PIECE_BYTES = 1 << 14
_STATE_CHARS = 16
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Content:
    """The content of data files at one time.

    Args:
        path: `data.path`; its name is that of the stored files.
        files: its files, in the order in which they are read.
        folders: where the digest may be stored.

    Raises:
        DataError: a file cannot be read, or changes.
    """

    def __init__(self, path: Path, files: Sequence[Path], folders: Iterable[Path]) -> None:
        self._source = path
        self._files = files
        self._state = _state(files)
        self.name = f".{path.resolve().name}."
        known = (remembered(self._path(folder)) for folder in folders)
        self.digest = next(filter(None, known), None) or self._read()

    def check(self) -> None:
        """Raise DataError if the files have changed since this was made."""
        if _state(self._files) != self._state:
            raise DataError(f"{self._source} changes while it is read; start when it is complete")

    def remember(self, folder: Path) -> None:
        """Store the digest in a folder, if it can be written."""
        path = self._path(folder)
        if remembered(path) != self.digest:
            with contextlib.suppress(OSError):
                write_whole(path, self.digest)

    def _path(self, folder: Path) -> Path:
        return folder / f"{self.name}{self._state}{SUFFIX}"

    def _read(self) -> str:
        digest = hashlib.sha256()
        for path in self._files:
            try:
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise unreadable(path, error) from None
        self.check()
        return digest.hexdigest()


def remembered(path: Path) -> str | None:
    """The digest in a file; None without one."""
    with contextlib.suppress(OSError, ValueError):
        text = read_text(path)
        return text if _DIGEST.fullmatch(text) else None
    return None


def _state(files: Sequence[Path]) -> str:
    """A digest of what the system says of the files, and of pieces of them.

    The time of change and the inode cannot be set, but some network file systems invent them; the
    pieces tell most changes there. The device's number is left out: NFS has another one on each
    machine.
    """
    digest = hashlib.sha256()
    num_pieces = min(_PIECES, max(2, _PIECES_OF_ALL // len(files)))
    for path in files:
        try:
            resolved = path.resolve()
            found = path.stat()
            times = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
            digest.update(repr((str(resolved), *times)).encode())
            with open(path, "rb") as file:
                last = max(0, found.st_size - _PIECE_BYTES)
                for start in sorted({last * k // (num_pieces - 1) for k in range(num_pieces)}):
                    file.seek(start)
                    digest.update(file.read(_PIECE_BYTES))
        # A path with a NUL is a ValueError.
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from None
    return digest.hexdigest()[:_STATE_CHARS]
