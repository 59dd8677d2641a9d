"""The parts of the check of several ranks, the most telling first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tools.nccl import (
    communicators,
    exact,
    faults,
    order,
    overlap,
    p2p,
    probe,
    race,
    resume,
    steps,
    widths,
)
from tools.nccl.found import Found
from tools.nccl.session import Session


class Part(NamedTuple):
    """A part: what it shows, how it runs, and its limit."""

    shows: str
    run: Callable[[Session], Found]
    limit_s: float
    needs_gpus: bool = False
    """Whether each rank needs a GPU of its own: what is measured means nothing on a shared one."""


PARTS: dict[str, Part] = {
    "probe": Part("which way ranks can use NCCL here", probe.run, 60),
    "exact": Part(
        "gradients, losses and log-probs of every layout equal those of one sample at a time",
        exact.run,
        190,
    ),
    "steps": Part("steps of random lengths do not hang, and ranks agree", steps.run, 90),
    "killed": Part("after a rank was killed every other one ends with its name", faults.killed, 45),
    "out_of_memory": Part(
        "a rank that runs out of memory ends every rank, and the next job starts",
        faults.out_of_memory,
        45,
    ),
    "resume": Part("a run that is saved resumes on another layout", resume.run, 90),
    "communicators": Part("time and memory of communicators", communicators.run, 30),
    "order": Part("all ranks issue their operations by the model of NCCL's rules", order.run, 10),
    "p2p": Part("latency and bandwidth of exchanges", p2p.run, 30, needs_gpus=True),
    "widths": Part(
        "a measured cost model, with rows over several ranks", widths.run, 90, needs_gpus=True
    ),
    "overlap": Part(
        "steps with communication that overlaps against steps without",
        overlap.run,
        60,
        needs_gpus=True,
    ),
    "race": Part(
        "a step on Megatron-LM's, slime's, verl's rows and ours, predicted and measured",
        race.run,
        150,
        needs_gpus=True,
    ),
}
NAMES = tuple(PARTS)
TOTAL_S = 560.0
"""Of all parts, and of the planner's compilation, which the parts after the probe wait for."""
