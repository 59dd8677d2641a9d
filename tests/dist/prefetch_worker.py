"""The step after the one that runs is prepared meanwhile; each rank counts the rows it packs.

torchrun --nproc-per-node 2 -m tests.dist.prefetch_worker OUT_DIR [silent | announcing]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from megapack import Layout, build_dp_schedule, launch
from megapack.errors import RankError
from megapack.loss import SFT
from megapack.rows.packed import pack_row
from megapack.schedule import ScheduleAdapter
from megapack.schedule import adapter as schedule
from tests.dist import problem
from tests.dist.setup import build_chunks

LAYOUT = Layout(pp=2)


class Run:
    """Two steps of a plan, between which something may change."""

    def __init__(self) -> None:
        self.num_packed = 0
        self.adapter = ScheduleAdapter(build_chunks(LAYOUT), layout=LAYOUT)
        lengths = problem.make_batch().lengths
        self.plan = build_dp_schedule(lengths, layout=LAYOUT, max_tokens_per_gpu=64, num_steps=2)
        mock.patch.object(schedule, "pack_row", self.counted).start()

    def counted(self, *args: Any) -> Any:
        self.num_packed += 1
        return pack_row(*args)

    def __call__(
        self, change: Callable[[dict[str, Any]], None] = lambda _: None, next_step: int | None = 1
    ) -> dict[str, Any]:
        """Rows that were packed, those of each step, and the second step's loss."""
        call: dict[str, Any] = {"batch": problem.make_batch(), "objective": problem.OBJECTIVE}
        self.num_packed = 0
        self.adapter.step(self.plan, step=0, next_step=next_step, **call)
        change(call)
        step = call.pop("step", 1)
        loss = self.adapter.step(self.plan, step=step, **call).loss
        counts = [len(step.ranks[0]) for step in self.plan.steps]
        return {"packed": self.num_packed, "counts": counts, "loss": loss}


def other_advantages(call: dict[str, Any]) -> None:
    call["batch"].set_field("advantages", [2.0] * len(call["batch"]))


def other_batch(call: dict[str, Any]) -> None:
    call["batch"] = problem.make_batch()


def other_objective(call: dict[str, Any]) -> None:
    call["objective"] = SFT()


def first_step_again(call: dict[str, Any]) -> None:
    call["step"] = 0


CHANGES = {
    change.__name__: change
    for change in (other_advantages, other_batch, other_objective, first_step_again)
}


def parted(run: Run, next_step: int | None) -> dict[str, str]:
    """One rank alone changes its batch, and the other one is in the announced step by then."""
    schedule._OTHER_CALL_S = 3.0
    call: dict[str, Any] = {"batch": problem.make_batch(), "objective": problem.OBJECTIVE}
    run.adapter.step(run.plan, step=0, next_step=1, **call)
    if os.environ["RANK"] == "1":
        other_advantages(call)
    try:
        run.adapter.step(run.plan, step=1, next_step=next_step, **call)
    except RankError as error:
        return {"error": str(error)}
    return {"error": ""}


def main(out_dir: str, one_rank_changes: str = "") -> None:
    """With and without a next step, and with each change in between."""
    launch.start("cpu")
    run = Run()
    if one_rank_changes:
        told = parted(run, {"silent": None, "announcing": 0}[one_rank_changes])
        path = Path(out_dir) / f"rank{os.environ['RANK']}.json"
        path.write_text(json.dumps(told), encoding="utf-8")
        return
    found = {"alone": run(next_step=None), "same": run()}
    for name, change in CHANGES.items():
        found[name] = run(change)
        found[f"{name}, alone"] = run(change, None)
    path = Path(out_dir) / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
