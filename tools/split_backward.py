"""Compare split backwards with joint ones, bit for bit, on every layout with every objective.

    python tools/split_backward.py [PATTERN ...]

Runs the cases of `tests/dist/schedule/split_backward_worker.py` whose names match a pattern, by
default all, on 1, 2 and 4 processes over gloo. Weight gradients run 2 to 5 backwards later. Exits
with 1 if a gradient differs in some bit. With MEGAPACK_TEST_TE=2.11.0 layers are those of that
release of Transformer Engine, whose Python `tools/te_python.sh` brings.
"""

from __future__ import annotations

import fnmatch
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.dist.schedule.split_backward_worker import CASES, MORE_CASES
from tests.dist.spawn import checked_job, rank_reports

WORLDS = (1, 2, 4)
# A case takes 2 to 10 seconds on two cores.
TIMEOUT_S = 900


def main(patterns: list[str]) -> int:
    """Run the cases and print a line for each; returns the exit code."""
    cases = {**CASES, **MORE_CASES}
    chosen = {
        name: case
        for name, case in cases.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns or ["*"])
    }
    num_wrong = 0
    for world in WORLDS:
        names = [name for name, case in chosen.items() if case.layout.world_size == world]
        if not names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            args = [folder, *names]
            checked_job(
                world, "tests.dist.schedule.split_backward_worker", args, timeout_s=TIMEOUT_S
            )
            reports = rank_reports(Path(folder), world)
        for name in names:
            facts = [report[name] for report in reports]
            num_wrong += any(own["different"] or own["unsteady"] or own["zero"] for own in facts)
            print(
                f"{name}: {sum(own['num_gradients'] for own in facts)} gradients, "
                f"{sum(len(own['different']) for own in facts)} differ, "
                f"by at most {max(own['largest'] for own in facts):.1e}"
            )
    print(f"{len(chosen)} cases, {num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
