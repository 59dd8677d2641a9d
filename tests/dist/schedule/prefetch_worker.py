"""The next step's rows are packed while a step runs; each rank counts the rows that it packs.

torchrun --nproc-per-node 2 -m tests.dist.schedule.prefetch_worker OUT_DIR [silent | announcing]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from megapack import Layout, build_dp_schedule, launch
from megapack.errors import RankError
from megapack.rows.packing import pack_row
from megapack.schedule import ScheduleAdapter, adapter, packer
from tests.dist import problem
from tests.dist.setup import build_chunks, write_report

LAYOUT = Layout(pp=2)


class Run:
    """Runs two steps of a plan; the call may change between them."""

    def __init__(self) -> None:
        self.num_packed = 0
        self.adapter = ScheduleAdapter(build_chunks(LAYOUT), layout=LAYOUT)
        lengths = problem.make_batch().lengths
        self.plan = build_dp_schedule(lengths, layout=LAYOUT, max_tokens_per_gpu=64, num_steps=2)
        mock.patch.object(packer, "pack_row", self.counted).start()

    def counted(self, *args: Any) -> Any:
        self.num_packed += 1
        return pack_row(*args)

    def __call__(
        self, change: Callable[[dict[str, Any]], None] = lambda _: None, next_step: int | None = 1
    ) -> dict[str, Any]:
        """Rows packed, rows of each step, and the second step's loss."""
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


def first_step_again(call: dict[str, Any]) -> None:
    call["step"] = 0


CHANGES = {change.__name__: change for change in (other_advantages, first_step_again)}


def changed_on_one_rank(run: Run, next_step: int | None) -> dict[str, str]:
    """Only rank 1 changes its batch; the other rank is already in the announced step."""
    adapter._OTHER_CALL_S = 3.0
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
    """Run with and without a next step, and with each change between the steps."""
    launch.start("cpu")
    run = Run()
    if one_rank_changes:
        outcome = changed_on_one_rank(run, {"silent": None, "announcing": 0}[one_rank_changes])
        write_report(out_dir, outcome)
        return
    results = {"unannounced": run(next_step=None), "announced": run()}
    for name, change in CHANGES.items():
        results[name] = run(change)
        results[f"{name}, unannounced"] = run(change, None)
    write_report(out_dir, results)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
