"""The run folder: the files that a run writes, and the lock that keeps a second process out."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megapack.base.files import write_whole
from megapack.cost.model import CostModel
from megapack.errors import ConfigError, DataError
from megapack.job.checkpoint.folders import writing
from megapack.job.train.trackers import Metrics, Tracker
from megapack.job.view.records import LENGTHS_FILE, METRICS_FILE, PLAN_FILE, TRACE_FILE
from megapack.plan.plan import Plan
from megapack.plan.text import COST

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
SETTINGS_FILE = "settings.txt"
COST_FILE = "cost.yaml"
# `flock` gives these on file systems without locks, such as Lustre mounted without flock.
_WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


class RunFolder:
    """`runs/<name>/`, written by one rank.

    It holds config.yaml, settings.txt, metrics.jsonl, plan.json and lengths.txt of the last batch,
    trace.jsonl of traced steps, and at the end cost.yaml of a fitted cost model. A folder of the
    same name from an earlier run is kept as `<name>.1`, `<name>.2` and so on; an empty one is used,
    also if it is a link to another disk.

    Args:
        continue_after: continue in the existing folder after this many steps: lines of later
            steps are cut from its files. None = a new folder.

    Raises:
        ConfigError: another run is using the folder, or it is a link to a folder that is gone.
        CheckpointError: the disk refuses a write. Every method that writes raises it.
    """

    def __init__(self, runs_dir: str, name: str, *, continue_after: int | None = None) -> None:
        self.path = Path(runs_dir) / name
        with writing(self.path), contextlib.ExitStack() as opened:
            if continue_after is None:
                _keep_earlier(self.path)
                self.path.mkdir(parents=True, exist_ok=True)
            opened.enter_context(lock_folder(self.path))
            if continue_after is not None:
                for name in (METRICS_FILE, TRACE_FILE):
                    path = self.path / name
                    if path.exists():
                        self.write_text(path.name, _lines_until(path, continue_after))
            self._metrics = opened.enter_context(
                open(self.path / METRICS_FILE, "a", encoding="utf-8")
            )
            # The lock and metrics.jsonl stay open until `close`.
            self._opened = opened.pop_all()
        self.trackers: Sequence[Tracker] = ()
        """Each of them gets every line of metrics; `close` closes them."""

    def write_text(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        path = self.path / name
        with writing(path):
            write_whole(path, text)

    def write_plan(self, plan: Plan, cost: CostModel, lengths: Sequence[int]) -> None:
        """Write the plan of the current batch with the cost model that it was made with, and its
        samples' lengths, one per line."""
        self.write_text(PLAN_FILE, f'{plan.to_json()[:-1]},"{COST}":{cost.to_json()}}}')
        self.write_text(LENGTHS_FILE, "".join(f"{length}\n" for length in lengths))

    def append_line(self, name: str, values: Mapping[str, Any]) -> None:
        """Add a line of JSON to a file that is written only now and then."""
        path = self.path / name
        with writing(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values, allow_nan=False) + "\n")

    def append_metrics(self, metrics: Metrics) -> None:
        """Add a line to metrics.jsonl and pass it to the trackers."""
        with writing(self.path / METRICS_FILE):
            self._metrics.write(json.dumps(_finite(metrics), allow_nan=False) + "\n")
            self._metrics.flush()
        for tracker in self.trackers:
            tracker.write(metrics)

    def close(self) -> None:
        """Close metrics.jsonl and the trackers, and release the lock; a second call does
        nothing."""
        trackers = self.trackers
        self.trackers = ()
        for tracker in trackers:
            tracker.close()
        self._opened.close()


def lock_folder(folder: Path) -> TextIO:
    """Lock a folder until the returned file is closed or the process ends.

    On a file system without locks this logs a warning, and the folder is not locked.

    Raises:
        ConfigError: another run holds the lock.
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
        logger.warning(
            "%s: this file system has no locks; two runs of one name would not be noticed",
            file.name,
        )


def _keep_earlier(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise ConfigError(
            f"{path} is a link to {os.readlink(path)}, which does not exist; make that folder, or "
            "set another name"
        )
    if not path.exists() or not set(os.listdir(path)) - {LOCK_FILE}:
        return
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    with lock_folder(path):
        path.rename(kept)
    link = f", a link to {os.readlink(kept)}" if kept.is_symlink() else ""
    logger.warning(
        "%s of an earlier run is kept as %s%s; this run starts anew in a new folder",
        *(path, kept, link),
    )


def _lines_until(path: Path, num_steps: int) -> str:
    """The file's lines of the first `num_steps` steps; a partial last line is left out."""
    kept = []
    # The part after the last line break is empty, or half a line of a run that was killed.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            if json.loads(line)["step"] <= num_steps:
                kept.append(f"{line}\n")
        except (ValueError, TypeError, KeyError):
            raise DataError(f"{path}:{number} is not a line of a step; remove it") from None
    return "".join(kept)


def _finite(metrics: Metrics) -> dict[str, float | int | str | None]:
    """Metrics with NaN and infinity as text, because JSON has neither."""
    return {
        k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
        for k, v in metrics.items()
    }
