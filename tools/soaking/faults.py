"""Faults of a soak: kinds, when they strike, how the job must react. All follows from a seed."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.soaking.job import Job

EXIT_RESUME = 75
"""The launcher's exit code for a run that was saved and is to be started again."""
_POLL_S = 0.0005


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One disturbance."""

    kind: str
    """A key of `KINDS`."""
    step: int
    """The fault strikes once the life has printed this step or a later one."""
    rank: int
    """The rank that it strikes, for kinds that strike one rank."""
    share: float
    """Strength or delay of the fault, in [0, 1); each kind uses it in its own way."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault and the reaction that it requires."""

    strike: Callable[[Job, Fault], None]
    exit_code: int | None = None
    """The launcher's exit code; None = any but 0."""
    ends: bool = True
    """Whether the job must end; else it must go on."""
    saves: bool = False
    """Whether no step may be lost; else the steps since the last checkpoint may."""
    says: str = ""
    """A regular expression that the job's output must match."""
    while_starting: bool = False
    """Strikes during the start and not at a step."""


def draw(
    seed: int,
    num_faults: int,
    num_steps: int,
    save_interval: int,
    world: int,
    among: Sequence[str] = (),
) -> list[Fault]:
    """Faults in the order in which they strike; every kind comes once before any repeats.

    Args:
        among: the kinds to draw from; empty = all.
    """
    rng = random.Random(seed)
    # The last faults leave time for one more checkpoint.
    steps = range(save_interval + 1, num_steps - 2 * save_interval)
    kinds: list[str] = []
    among = list(among or KINDS)
    while len(kinds) < num_faults:
        kinds += rng.sample(among, len(among))
    return [
        Fault(kind=kind, step=step, rank=rng.randrange(world), share=rng.random())
        for kind, step in zip(kinds, sorted(rng.choices(steps, k=num_faults)), strict=False)
    ]


def due(fault: Fault, job: Job, start_s: float) -> bool:
    """Whether a fault strikes now, in a life that needs `start_s` seconds to its first step."""
    if KINDS[fault.kind].while_starting:
        return time.monotonic() - job.started >= fault.share * start_s
    return bool(job.last_step) and job.last_step >= fault.step


def _kill_rank(job: Job, fault: Fault) -> None:
    _send(job, fault, signal.SIGKILL)


def _stop_rank(job: Job, fault: Fault) -> None:
    _send(job, fault, signal.SIGSTOP)
    time.sleep(1 + 3 * fault.share)
    _send(job, fault, signal.SIGCONT)


def _terminate(job: Job, fault: Fault) -> None:
    job.launcher.send_signal(signal.SIGTERM)


def _kill_job(job: Job, fault: Fault) -> None:
    job.kill()


def _kill_launcher(job: Job, fault: Fault) -> None:
    """Kill torchrun only; its ranks are orphaned."""
    for pid in {_parent(pid) for pid in job.ranks().values()}:
        os.kill(pid, signal.SIGKILL)


def _fill_disk(job: Job, fault: Fault) -> None:
    """Limit the file size, so that the next checkpoint or line of metrics is cut off."""
    latest = max(_checkpoints(job).glob("step-*[0-9]/checkpoint.json"))
    limit = int(fault.share * max(json.loads(latest.read_text())["files"].values()))
    for pid in job.ranks().values():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def _kill_saving(job: Job, fault: Fault) -> None:
    """Kill the job while it writes a checkpoint, and overwrite half of the longest file."""
    while not list(_checkpoints(job).glob("*.part")) and job.running():
        time.sleep(_POLL_S)
    time.sleep(0.05 * fault.share)
    job.kill()
    for part in _checkpoints(job).glob("*.part"):
        files = [path for path in part.rglob("*") if path.is_file()]
        if files:
            longest = max(files, key=lambda path: path.stat().st_size)
            longest.write_bytes(b"\xff" * (longest.stat().st_size // 2))


def _send(job: Job, fault: Fault, number: int) -> None:
    pid = job.ranks().get(fault.rank)
    if pid is not None:
        os.kill(pid, number)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _checkpoints(job: Job) -> Path:
    return job.folder / "runs/run/checkpoints"


KINDS = {
    "rank killed": Kind(_kill_rank),
    "rank stopped, goes on": Kind(_stop_rank, ends=False),
    "SIGTERM": Kind(
        _terminate, exit_code=EXIT_RESUME, saves=True, says="a signal ended the run after step"
    ),
    "job killed": Kind(_kill_job),
    "launcher killed": Kind(_kill_launcher),
    "disk full": Kind(_fill_disk, says="cannot be written|File too large"),
    "killed while saving": Kind(_kill_saving),
    "killed while starting": Kind(_kill_job, while_starting=True),
}
"""Kinds of faults by name."""
