"""One life of a run: the launcher, its ranks, the steps printed, and the ranks' resources."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "tools/launch/torchrun.sh"
CONFIG = ROOT / "configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
_STEP = re.compile(r"^step (\d+)(?:/\d+)?: ", re.MULTILINE)
_GROUP_THREAD = "gloo_tcp_loop"
"""Name of a thread that each gloo process group has exactly one of."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Resources that one rank holds at one time."""

    life: int
    step: int
    rank: int
    rss_mib: float
    """Resident memory, with shared pages in full."""
    pss_mib: float
    """Resident memory, with shared pages divided by the number of processes that share them."""
    uss_mib: float
    """Resident memory that no other process shares."""
    threads: int
    fds: int
    groups: int
    """Gloo process groups, counted by their threads."""


class Job:
    """`tools/launch/torchrun.sh` on this machine, in its own session.

    Args:
        folder: the working directory; the run's folder is `runs/run` in it.
        life: number of this start of the run; part of the log's name.
        world: number of ranks.
        settings: overrides of the config.
    """

    def __init__(self, folder: Path, life: int, world: int, settings: Sequence[str]) -> None:
        self.folder = folder
        self.life = life
        self.world = world
        self.log = folder / f"life{life}.log"
        environment = {"NPROC_PER_NODE": str(world), "PYTHON": sys.executable}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with open(self.log, "wb") as log:
            self.launcher = subprocess.Popen(
                [str(LAUNCHER), str(CONFIG), *settings],
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started = time.monotonic()
        self.last_step = 0
        """The last step that this life has printed; 0 = no step yet."""
        self.first_step = 0
        self._processes: set[tuple[int, str]] = set()
        self._read_bytes = 0

    def running(self) -> bool:
        """Whether the launcher runs; also records new processes and steps."""
        self._processes |= _descendants(self.launcher.pid)
        with open(self.log, "rb") as log:
            log.seek(self._read_bytes)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        steps = [int(number) for number in _STEP.findall(whole.decode(errors="replace"))]
        if steps:
            self.first_step = self.first_step or steps[0]
            self.last_step = steps[-1]
        return self.launcher.poll() is None

    def ranks(self) -> dict[int, int]:
        """Process ids by rank, of the ranks started so far."""
        found = {}
        for pid, _ in _descendants(self.launcher.pid):
            rank = _environment(pid).get("RANK")
            if rank is not None:
                found[int(rank)] = pid
        return found

    def kill(self) -> None:
        """Send SIGKILL to the launcher, torchrun and all ranks, as simultaneously as possible."""
        self._processes |= _descendants(self.launcher.pid)
        self.launcher.kill()
        for process in filter(_alive, self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process[0], signal.SIGKILL)
        self.launcher.wait()

    def left_behind(self, patience_s: float = 10.0) -> list[int]:
        """Processes of the job that still run `patience_s` seconds after its launcher ended."""
        deadline = time.monotonic() + patience_s
        while (left := sorted(filter(_alive, self._processes))) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [pid for pid, _ in left]

    def output(self) -> str:
        """The job's output so far."""
        return self.log.read_text(errors="replace")

    def samples(self) -> list[Sample]:
        """A sample of every rank, without ranks that end meanwhile."""
        found = []
        for rank, pid in sorted(self.ranks().items()):
            try:
                found.append(_sample(self.life, self.last_step, rank, Path(f"/proc/{pid}")))
            except (OSError, KeyError):
                continue
        return found


def _sample(life: int, step: int, rank: int, process: Path) -> Sample:
    memory = {}
    for line in (process / "smaps_rollup").read_text().splitlines()[1:]:
        name, kib, _ = line.split()
        memory[name.rstrip(":")] = int(kib) / 1024
    names = [(task / "comm").read_text().strip() for task in (process / "task").iterdir()]
    return Sample(
        life=life,
        step=step,
        rank=rank,
        rss_mib=memory["Rss"],
        pss_mib=memory["Pss"],
        uss_mib=memory["Private_Clean"] + memory["Private_Dirty"],
        threads=len(names),
        fds=len(list((process / "fd").iterdir())),
        groups=names.count(_GROUP_THREAD),
    )


def _descendants(pid: int) -> set[tuple[int, str]]:
    """Ids and start times of all descendants of a process; ids alone may be reused."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return set()
    own = {(child, _start(child)) for child in map(int, children)}
    return own.union(*(_descendants(child) for child, _ in own))


def _start(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else fields[18]


def _alive(process: tuple[int, str]) -> bool:
    pid, started = process
    return started != "" and _start(pid) == started


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
