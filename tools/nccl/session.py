"""What the parts of a check have in common: ranks, GPUs, the way to NCCL, limits, and its jobs.

job = session.job("pp2", "tools.nccl.on_ranks.exact", reference, out)
job.ended.reason        # why it is not good
job.order               # what its ranks issued, and whether that keeps NCCL's rules
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.rehearsal import nccl_rules, notes
from tests.rehearsal.communicators import P2P_MODELS
from tests.rehearsal.notes import Notes, Op
from tools.nccl.launch import Ended, run_ranks
from tools.nccl.on_ranks.faked import FAULT
from tools.nccl.on_ranks.start import NOTES
from tools.nccl.ways import OWN_GPUS, Way

PATIENCE = 10
"""A rehearsal on a few cores gets as many times the seconds."""
STALL_S = 60.0
GRACE_S = 5.0
# More is not checked: the graph of launches would take minutes.
_MAX_EVENTS = 20_000
# NCCL's own log has one such line for each communicator of a rank.
_MADE = "Init COMPLETE"


class Order(NamedTuple):
    """What the ranks of a job issued."""

    job: str
    num_operations: int
    """Of all ranks, as far as they are checked."""
    broken: str
    """What breaks NCCL's rules, by the model of them; "" if nothing does."""
    modelled: int
    """Communicators that the model of torch's groups says, of all ranks."""
    made: int
    """Those that NCCL's log names; 0 without a log."""


class Job(NamedTuple):
    """A job that has ended."""

    ended: Ended
    order: Order


@dataclass(kw_only=True)
class Session:
    """One call of the check.

    Attributes:
        end: when the part that runs must have ended, by `time.monotonic`.
        fault: of a rehearsal: what NCCL does in the part that runs.
        orders: of the jobs so far.
    """

    ranks: int
    num_gpus: int
    out: Path
    rehearsed: bool
    stall_s: float
    way: Way = OWN_GPUS
    part: str = ""
    end: float = field(default_factory=lambda: time.monotonic() + 600)
    fault: str = ""
    orders: list[Order] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds that the part that runs still has."""
        return self.end - time.monotonic()

    def folder(self, name: str = "") -> Path:
        """An empty folder of the part that runs, or of one of its jobs."""
        path = self.out / "ranks" / self.part / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def job(
        self,
        name: str,
        module: str,
        *arguments: object,
        world: int | None = None,
        way: Way | None = None,
        limit_s: float | None = None,
        grace_s: float = GRACE_S,
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """Run a module on all ranks, or on the first `world` of them, until the part's end.

        Args:
            limit_s: an earlier end.
            environment: variables of all ranks.
        """
        world = world or self.ranks
        folder = self.folder(name)
        recorded = folder / "notes"
        recorded.mkdir()
        way = way or self.way

        def own(rank: int) -> dict[str, str]:
            log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
            log["NCCL_DEBUG_FILE"] = str(folder / f"rank{rank}.nccl")
            # fp32 is fp32, also where Transformer Engine asks for TF32.
            log |= {"NVIDIA_TF32_OVERRIDE": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            device = {"LOCAL_RANK": str(rank % self.num_gpus), NOTES: str(recorded)}
            fault = {FAULT: self.fault} if world > 1 else {}
            return {**log, **device, **fault, **way.environment(rank), **(environment or {})}

        ended = run_ranks(
            ["-m", "tools.nccl.on_ranks.start", module, *map(str, arguments)],
            world=world,
            environment=own,
            folder=folder,
            limit_s=min(self.left_s, limit_s or self.left_s),
            stall_s=self.stall_s,
            grace_s=grace_s * (PATIENCE if self.rehearsed else 1),
        )
        order = read_order(f"{self.part}/{name}", folder, world, has_ended=ended.is_good)
        shutil.rmtree(recorded)
        if world > 1:
            self.orders.append(order)
        return Job(ended, order)


def read_order(job: str, folder: Path, world: int, *, has_ended: bool) -> Order:
    """What the ranks of a job issued, from the notes and NCCL's logs in its folder."""
    ranks = notes.read(folder / "notes", world)
    for one in ranks:
        has_ended = has_ended and len(one.events) <= _MAX_EVENTS
        del one.events[_MAX_EVENTS:]
    broken = nccl_rules.check(ranks, has_ended=has_ended)
    logs = [folder / f"rank{rank}.nccl" for rank in range(world)]
    return Order(
        job,
        sum(isinstance(event, Op) for one in ranks for event in one.events),
        "; ".join(broken[:2]),
        sum(map(_num_communicators, ranks)),
        sum(_num_made(path) for path in logs if path.exists()),
    )


def _num_communicators(rank: Notes) -> int:
    """Communicators of a rank in a job whose `init_process_group` gets no device_id."""
    (model,) = (model for model in P2P_MODELS if not model.has_device_id)
    return len({model.communicator(rank.rank, op) for op in rank.events if isinstance(op, Op)})


def _num_made(path: Path) -> int:
    return path.read_text(encoding="utf-8", errors="replace").count(_MADE)
