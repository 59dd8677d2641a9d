"""A user's own loop around the adapter, in which rank 3 fails; each rank writes its errors.

torchrun --nproc-per-node 4 -m tests.dist.schedule.own_loop_worker OUT_DIR FAILS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megapack import Layout, build_dp_schedule, launch
from megapack.errors import MegapackError
from megapack.loss import SFT
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.setup import build_chunks, write_report

LAYOUT = Layout(dp=2, pp=2)
# With dp=2, the first stage has ranks 0 and 1, the last stage ranks 2 and 3.
ODD_RANK = 3


class Fails(SFT):
    """A user's own loss, which fails on one rank in the second step."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.num_steps = 0

    def __call__(self, *args: Any) -> Any:
        if dist.get_rank() == ODD_RANK and self.num_steps == 2:
            if self.fails == "exit":
                sys.exit(0)
            if self.fails == "error":
                raise ValueError("the user's own loss failed")
        return super().__call__(*args)

    def __repr__(self) -> str:
        return "Fails()"


def outcome_of(attempt: Callable[[], object]) -> dict[str, Any]:
    """The error of an attempt, its notes, and the seconds until it came."""
    started = time.monotonic()
    error = ""
    notes = ""
    try:
        attempt()
    except MegapackError as caught:
        error = f"{type(caught).__name__}: {caught}"
        notes = "\n".join(getattr(caught, "__notes__", ()))
    return {"error": error, "notes": notes, "seconds": time.monotonic() - started}


def main(out_dir: str, fails: str) -> None:
    """Run two steps, and one more after the error."""
    launch.start("cpu")
    adapter = ScheduleAdapter(build_chunks(LAYOUT), layout=LAYOUT)
    batch = problem.make_batch()
    objective = Fails(fails)
    plan = build_dp_schedule(batch.lengths, layout=LAYOUT, max_tokens_per_gpu=64)

    def step() -> None:
        objective.num_steps += 1
        if dist.get_rank() == ODD_RANK and (fails, objective.num_steps) == ("between", 2):
            raise ValueError("the user's own loop failed")
        adapter.step(plan, batch, objective=objective)

    outcomes = [outcome_of(step) for _ in range(3)]
    write_report(out_dir, outcomes)
    launch.stop(broken=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
