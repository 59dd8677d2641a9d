"""Train random models on random layouts, and compare with one unpadded sample at a time.

    python tools/random_cells.py [--seed N] [--count N] [--seconds S] [--processes 2 4 8]
                                 [--out runs/cells] [--write]
    python tools/random_cells.py --cell SEED_N

A cell is the main job for two to four steps on 1 to 8 processes over gloo: a random model,
objective and file of samples (a problem), layout, plan and optimizer. Loss, metrics, gradients,
gradient norm, weights and log-probs of each step are compared with those of the same job in one
process that runs one sample at a time. Prints a line of JSON per cell, and tables at the end. The
exit code is 1 if a cell is wrong, hangs, crashes, or is refused late or in several lines. Such
cells leave their folder, with `config.yaml`, in --out. Equal seeds give equal cells. With `--write`
the tables go into docs/measured/random_cells.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megapack.config.load import load_config  # noqa: E402
from megapack.errors import MegapackError  # noqa: E402
from megapack.job.config.sections import TrainConfig  # noqa: E402
from tests.dist.spawn import run_job  # noqa: E402
from tools.cells.draw import Cell, draw_cell, nested  # noqa: E402
from tools.cells.judge import ACCEPTED, judge, table  # noqa: E402
from tools.pages.measured import versions, write  # noqa: E402

WORKER = "tools.cells.worker"
GOOD = ("right", "refused")


def run_cell(cell: Cell, out: Path, *, timeout_s: float = 180.0) -> dict[str, Any]:
    """Run a cell, after its reference if that is not in `out` yet; returns its line."""
    started = time.monotonic()
    problem = out / cell.problem
    folder = problem / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    _write(folder, cell.keys)
    lines = "".join(f"{json.dumps(sample)}\n" for sample in cell.samples)
    (problem / "samples.jsonl").write_text(lines)
    keys = {name: cell.keys[name] for name in sorted(cell.keys.keys() - cell.reference.keys())}
    facts = {"cell": cell.name, "world": cell.world, "keys": keys}
    reference = None if _refuses(folder) else _reference(cell, problem)
    args = ["config.yaml", "."] + ([] if reference is None else [str(reference)])
    try:
        done = run_job(cell.world, WORKER, args, timeout_s=timeout_s, cwd=folder, grace_s=20)
        found = judge(folder, reference, cell.world, done.returncode, done.stdout)
    except TimeoutError as error:
        found = {"verdict": "hang", "text": str(error)[-2000:]}
    if found["verdict"] in GOOD:
        shutil.rmtree(folder)
    return {**facts, **found, "seconds": round(time.monotonic() - started, 1)}


def _refuses(folder: Path) -> bool:
    try:
        load_config(folder / "config.yaml", [], TrainConfig)
    except MegapackError:
        return True
    return False


def _reference(cell: Cell, problem: Path) -> Path | None:
    """The file of the problem's reference; None if that is refused or fails, as the cell should."""
    folder = problem / "reference"
    found = folder / "reference.pt"
    if not folder.exists():
        _write(folder, cell.reference)
        run_job(1, WORKER, ["config.yaml", "."], timeout_s=180, cwd=folder)
    return found if found.exists() else None


def _write(folder: Path, keys: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # JSON is YAML.
    (folder / "config.yaml").write_text(json.dumps(nested(keys), indent=1) + "\n")


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """The cells that were asked for."""
    if options.cell is not None:
        seed, number = map(int, options.cell.split("_"))
        yield draw_cell(seed, number)
        return
    drawn = (draw_cell(options.seed, number) for number in itertools.count(options.first))
    fitting = (cell for cell in drawn if cell.world in options.processes)
    yield from itertools.islice(fitting, options.count)


def run_cells(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run cells until the count or the seconds are over; prints each."""
    end = time.monotonic() + options.seconds
    results: list[dict[str, Any]] = []
    for problem, own in itertools.groupby(cells(options), lambda cell: cell.problem):
        folder = options.out / problem
        shutil.rmtree(folder, ignore_errors=True)
        for cell in own:
            if time.monotonic() < end:
                results.append(run_cell(cell, options.out))
                print(json.dumps(results[-1]), flush=True)
        if options.cell is None:
            _forget(folder)
        if time.monotonic() > end:
            break
    return results


def _forget(problem: Path) -> None:
    """Remove the folder of a problem whose cells were all right."""
    if {path.name for path in problem.iterdir()} <= {"samples.jsonl", "reference"}:
        shutil.rmtree(problem)


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first cell")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--cell", help="run this one alone, and keep its folder")
    parser.add_argument("--out", type=Path, default=Path("runs/cells"))
    parser.add_argument("--write", action="store_true", help="write the file of docs/measured")
    options = parser.parse_args()
    options.out = options.out.absolute()
    results = run_cells(options)
    accepted = sum(cell["verdict"] in ACCEPTED for cell in results)
    lines = [f"{len(results)} cells, {accepted} accepted.", "", table(results)]
    print("", *lines, sep="\n")
    if options.write:
        what = (
            "Random models, objectives, samples, layouts, plans and optimizers: each step of the "
            "main job against the job in one process that runs one sample at a time."
        )
        with_versions = f"{versions('megatron-core', 'torch')}, gloo"
        write("random_cells", "Exactness of random cells", what, lines, with_versions)
    return int(any(cell["verdict"] not in GOOD for cell in results))


if __name__ == "__main__":
    sys.exit(main())
