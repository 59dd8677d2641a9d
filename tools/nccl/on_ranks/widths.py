"""Times rows over one and several ranks and fits a cost model to them, as `tools/calibrate.py`.

python -m tools.nccl.on_ranks.widths TASK OUT COST_FILE
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megapack import CostModel, Measurement, launch
from megapack.config import dump_yaml
from megapack.cost.calibration import Calibration
from megapack.job.gpt import initialize_parallel
from tests.rehearsal import recorder
from tools import calibrate
from tools.benching.calibration_rows import fit_whole_model, on_one_rank, relative_errors
from tools.nccl.measured import read_config, read_task
from tools.nccl.on_ranks.measured import Together, with_random_weights
from tools.nccl.on_ranks.progress import note, write


class NotedStep(calibrate.TimedStep):
    """A step that notes progress."""

    def run(self, timer: calibrate.RowTimer, *, splits: bool = False) -> Sequence[Any]:
        note("rows")
        return super().run(timer, splits=splits)


def errors(
    measured: Sequence[Measurement], job: calibrate.Job, fitted: CostModel, assumed: CostModel
) -> dict[str, dict[str, float]]:
    """Relative errors of forward plus backward, by the ranks that share a row."""
    found = {}
    for width in job.layout.widths:
        rows = [row for row in measured if row.width == width]
        own, from_sizes = (
            np.abs(relative_errors(cost, job.layout, rows)[1]) for cost in (fitted, assumed)
        )
        found[f"rows over {width}"] = {
            "rows": len(rows),
            "mean_error": float(own.mean()),
            "worst_error": float(own.max()),
            "mean_error_from_sizes": float(from_sizes.mean()),
        }
    return found


def main(path: str, out: str, cost_file: str) -> None:
    """Measure and fit; rank 0 writes the model and its errors."""
    task = read_task(path)
    launch.start("cuda")
    together = Together(task["end"])
    config = read_config(task["settings"])
    job = calibrate.Job(config)
    initialize_parallel(job.layout, config.seed)
    timer = with_random_weights(config.seed, job.timer)(config.model.num_layers)
    note("built")
    grid = job.grid(None, job.layout.widths)
    step = NotedStep(grid.plan, grid.batch)
    (measured,) = calibrate.measure(
        timer, [step], task["rounds"], splits=False, is_over=together.is_over
    )
    cost, assumed = fit_whole_model(measured, job.target), config.cost_from_sizes(job.target)
    by_width = errors(measured, job, cost, assumed)
    if dist.get_rank() == 0:
        worst = max(one["worst_error"] for one in by_width.values())
        origin = calibrate.origin(len(on_one_rank(measured)), worst)
        origin = dataclasses.replace(origin, command="tools/nccl_check.py --parts widths")
        Path(cost_file).write_text(dump_yaml(Calibration(cost=cost, origin=origin)), "utf-8")
    found = {
        "per_token_us": 1e6 * cost.per_token,
        "per_token_us_from_sizes": 1e6 * assumed.per_token,
        "cp_overhead": cost.cp_overhead,
        "cp_overhead_from_sizes": assumed.cp_overhead,
        "cp_fixed_us": 1e6 * cost.cp_fixed,
        "cp_fixed_us_from_sizes": 1e6 * assumed.cp_fixed,
    }
    write(out, {"errors": by_width, **found})
    launch.stop()


if __name__ == "__main__":
    with recorder.unchecked():
        main(*sys.argv[1:])
