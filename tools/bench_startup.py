"""CPU time that the start-up file adds to `python -c pass`, with and without it in alternation.

python tools/bench_startup.py [RUNS]
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

STARTUP = Path(__file__).resolve().parents[1] / "megapack-startup.pth"


def cpu_ms(python: Path) -> float:
    """User and system time of one empty process."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MEGAPACK_PATCH")}
    process = subprocess.Popen([python, "-c", "pass"], env=env)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return (usage.ru_utime + usage.ru_stime) * 1e3


def main(num_runs: int) -> None:
    """Print the medians of both and their difference."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder)
        (site,) = Path(folder).glob("lib/python3*/site-packages")
        times: dict[bool, list[float]] = {True: [], False: []}
        for run in range(num_runs):
            # The order alternates, so that neither always runs first.
            for with_file in (True, False) if run % 2 else (False, True):
                if with_file:
                    shutil.copy(STARTUP, site)
                else:
                    (site / STARTUP.name).unlink(missing_ok=True)
                times[with_file].append(cpu_ms(Path(folder, "bin", "python")))
    medians = {with_file: statistics.median(values) for with_file, values in times.items()}
    print(f"without {medians[False]:.2f} ms, with {medians[True]:.2f} ms")
    print(f"added {medians[True] - medians[False]:.2f} ms, medians of {num_runs} runs each")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
