"""A loop of one's own around the adapter, in which rank 1 fails; each rank writes what it was told.

torchrun --nproc-per-node 4 -m tests.dist.own_loop_worker OUT_DIR FAILS
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megapack import Layout, build_dp_schedule, launch
from megapack.errors import MegapackError
from megapack.loss import SFT
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.setup import build_chunks

LAYOUT = Layout(dp=2, pp=2)
# Stages are numbered in steps of dp: the last one has ranks 2 and 3.
ODD_RANK = 3


class Fails(SFT):
    """The user's own loss, which fails on one rank, in its second step."""

    def __init__(self, fails: str) -> None:
        self.fails, self.num_steps = fails, 0

    def __call__(self, *args: Any) -> Any:
        if dist.get_rank() == ODD_RANK and self.num_steps == 2:
            if self.fails == "exit":
                sys.exit(0)
            if self.fails == "error":
                raise ValueError("the user's own loss failed")
        return super().__call__(*args)

    def __repr__(self) -> str:
        return "Fails()"


def told(attempt: Callable[[], object]) -> dict[str, Any]:
    """The error, its notes, and how long it took to come."""
    started = time.monotonic()
    error, notes = "", ""
    try:
        attempt()
    except MegapackError as caught:
        error = f"{type(caught).__name__}: {caught}"
        notes = "\n".join(getattr(caught, "__notes__", ()))
    return {"error": error, "notes": notes, "seconds": time.monotonic() - started}


def main(out_dir: str, fails: str) -> None:
    """Two steps, and one more after an error."""
    launch.start("cpu")
    adapter = ScheduleAdapter(build_chunks(LAYOUT), layout=LAYOUT)
    batch, objective = problem.make_batch(), Fails(fails)
    plan = build_dp_schedule(batch.lengths, layout=LAYOUT, max_tokens_per_gpu=64)

    def step() -> None:
        objective.num_steps += 1
        if dist.get_rank() == ODD_RANK and (fails, objective.num_steps) == ("between", 2):
            raise ValueError("the user's own loop failed")
        adapter.step(plan, batch, objective=objective)

    found = [told(step) for _ in range(3)]
    path = Path(out_dir) / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    launch.stop(broken=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
