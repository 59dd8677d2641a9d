"""One process at a time in a folder: a lock that ends with the process, however that ends."""

from __future__ import annotations

import errno
import logging
import os
import socket
from pathlib import Path
from typing import TextIO

from megapack.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
# Of file systems that have no locks, Lustre mounted without them for one.
_WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


def lock_folder(folder: Path) -> TextIO:
    """Take a folder until the file that is returned is closed, or the process ends.

    A file system without locks gives a warning and no lock.

    Raises:
        ConfigError: another run has it.
        OSError: the lock file cannot be written.
    """
    path = folder / LOCK_FILE
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    try:
        _lock(file)
        # Between opening and locking another run may have moved the folder away.
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise BlockingIOError
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except BlockingIOError:
        file.close()
        holder = path.read_text(encoding="utf-8").strip() or "another process"
        raise ConfigError(f"{folder} is in use by {holder}; set another name") from None
    except BaseException:
        file.close()
        raise
    return file


def _lock(file: TextIO) -> None:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        logger.warning("%s: no locks here; two runs of one name are not found out", file.name)
