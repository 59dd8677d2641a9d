"""Packed rows in FP8, on the stand-ins of Transformer Engine's kernels.

Scales of squares of weights, of 1 x 128 and of 32 channels of a token, and those of earlier steps,
do not depend on the other samples of a row. In these recipes a sample has the log-probs that it has
alone: bf16's rounding of sums remains where the machine adds in another order. Under tensorwise
scaling the row's largest value sets the scale of all its samples, and log-probs differ by as much
as FP8 rounds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.rows.fp8_cases import CASES
from tests.dist.spawn import checked_job, rank_reports
from tests.marks import needs_te
from tests.te_python import VERSION

pytestmark = [pytest.mark.dist, needs_te]

JOBS = {
    (world, gpu): [
        name
        for name, case in CASES.items()
        if (case.layout.world_size, case.capability) == (world, gpu)
    ]
    for world in (1, 2)
    for gpu in ((9, 0), (10, 0))
}


@pytest.mark.parametrize(
    ("world", "gpu"),
    [pytest.param(*job, marks=() if job == (2, (9, 0)) else pytest.mark.rehearsal) for job in JOBS],
)
def test_rows_in_fp8(world: int, gpu: tuple[int, int], tmp_path: Path) -> None:
    args = [str(tmp_path), *JOBS[world, gpu]]
    checked_job(world, "tests.dist.rows.fp8_worker", args, timeout_s=290, te=VERSION)
    for rank in rank_reports(tmp_path, world):
        for name, found in rank.items():
            case = CASES[name]
            assert found["samples"] > 1, name
            # bf16 rounds to 2**-9 = 2e-3, e4m3 to 2**-4 = 6e-2 of a value.
            assert found["packing"] < (3e-2 if case.recipe == "tensorwise" else 1e-3), name
            assert 1e-3 < found["logprobs"] < 3e-2, name
            assert 1e-2 < found["gradient"] < 0.2, name
            # Each weight is rounded once in a step, in its first micro-batch.
            assert found["weights"] == (20 if case.model == "experts" else 8), name
            assert (found["scales"] > 0) == (case.recipe == "delayed"), name
            assert found["differing scales"] == 0, name
            assert f"fp8_recipe='{case.recipe}' needs rows of a multiple of" in found["unaligned"]
