"""Runs the cases of `wait_cases.py` and the main job, and reads what the ranks counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dist.schedule.wait_cases import ALL_CASES
from tests.dist.spawn import ROOT, checked_job, rank_reports
from tests.te_python import VERSION

PASSES = ("forward", "step", "update")
SIZES = ("x1", "x2")
_CASES_PER_JOB = 5


@dataclass(frozen=True)
class Counted:
    """What ranks of a job would do on GPUs."""

    entries: list[list[dict[str, Any]]]
    """Of each rank, see `host_waits_worker.written`."""
    facts: list[dict[str, int]]
    """Of each size, see `host_waits_worker.facts`; of the main job the rows of each step."""

    def of(self, kind: str, phase: str | None = None, key: str = "place") -> Counter[str]:
        """Entries of a kind by place or text, of one phase or of all: the most of any rank."""
        found: Counter[str] = Counter()
        for rank in self.entries:
            own: Counter[str] = Counter()
            for entry in rank:
                if entry["kind"] == kind and phase in (None, entry["phase"]):
                    own[entry[key]] += entry["count"]
            found |= own
        return found

    @property
    def faults(self) -> list[str]:
        """Mixed places and tensors of another place in collectives."""
        return [*self.of("mixed", key="text"), *self.of("collective", key="text")]

    def grows(self, name: str) -> set[str]:
        """Places that wait more often in the larger of the two passes of this name."""
        few, many = (self.of("wait", f"{size} {name}") for size in SIZES)
        return {*(many - few)}


def run_wait_job(folder: Path, *overrides: str) -> Counted:
    """Run the main job on one rank, with a reference policy and checkpoints, in steps of 8 rows or
    more."""
    config = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
    args = [
        *("name=run", "device=cuda", "layout.dp=1", "layout.pp=1", "layout.vpp=1"),
        *("model.attention=te", "model.dtype=bf16", "plan.max_tokens_per_gpu=512"),
        *("data.num_generated=64", "data.prompts_per_batch=8", "plan.global_batch_size=32"),
        *("train.save_interval=2", f"runs_dir={folder / 'runs'}", *overrides),
    ]
    worker = "tests.dist.schedule.host_waits_job"
    checked_job(1, worker, [str(folder), str(config), *args], timeout_s=500, te=VERSION)
    (found,) = rank_reports(folder, 1)
    return Counted([found["entries"]], [{"rows": rows} for rows in found["rows"]])


def run_wait_cases(names: Iterable[str], folder: Path) -> dict[str, Counted]:
    """Run cases, a few per job."""
    jobs: dict[tuple[int, bool], list[str]] = {}
    for name in names:
        case = ALL_CASES[name]
        jobs.setdefault((case.layout.world_size, case.attention == "te"), []).append(name)
    results = {}
    for (world, needs_te), own in jobs.items():
        for first in range(0, len(own), _CASES_PER_JOB):
            part = own[first : first + _CASES_PER_JOB]
            args = [str(folder), *part]
            te = VERSION if needs_te else ""
            checked_job(world, "tests.dist.schedule.host_waits_worker", args, timeout_s=500, te=te)
            ranks = rank_reports(folder, world)
            for name in part:
                entries = [rank[name]["entries"] for rank in ranks]
                results[name] = Counted(entries, ranks[0][name]["facts"])
    return results
