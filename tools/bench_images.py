"""Times steps with images on four processes: the tower in rows, and ahead; the simulator beside it.

    python tools/bench_images.py [--models NAME ...] [--layouts NAME ...] [--measured]

"Row" encodes the images of each sample in the first chunk's forward, as models of other frameworks
do, and its backward runs through the tower. "Ahead" is the product's way. Both run real steps of a
toy over gloo. Processes share cores, so that each forward, backward and call of the tower sleeps
until the seconds of a real model on an H100, times `--slow`, are over: what is measured is in which
order ranks run, send and wait. `--measured` writes docs/measured/images_cpu.md.

Both ways must give the gradients of a single process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.dist.spawn import checked_job, rank_reports
from tools.bench_planner import machine
from tools.benching.image_steps import Steps
from tools.benching.image_traces import TRACES
from tools.pages import measured
from tools.pages.marks import table

WORKER = "tools.benching.image_steps"
LAYOUTS = ("pp4", "dp2_pp2", "dp2_pp2_vpp2")
MODELS = ("Qwen3-VL-8B", "Qwen3-VL-30B-A3B")
LIMIT = 1e-5
"""Of the relative difference of gradients."""
TITLE = "Images in rows and ahead: steps of four processes on a CPU"
HEAD = (
    *("seconds of", "layout", "M", "encoded in rows", "ahead", "row, s", "simulated"),
    *("ahead, s", "simulated", "row / ahead", "simulated", "late", "gradients"),
)


def check(layout: str, errors: dict[str, float]) -> None:
    """Raise SystemExit if gradients differ."""
    # One that is not a number is not within the limit.
    if not all(value <= LIMIT for value in errors.values()):
        raise SystemExit(f"{layout}: gradients differ by {errors}; the limit is {LIMIT}")


def run(steps: Sequence[Steps], layouts: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """What was found by layout, of each of `steps`.

    Raises:
        SystemExit: gradients differ.
    """
    found = []
    for number, own in enumerate(steps):
        out = folder / f"{number}"
        out.mkdir()
        args = [str(folder), str(out), json.dumps(asdict(own))]
        if not number:
            # Weights and samples are the same for all.
            checked_job(1, WORKER, [*args, "single"], timeout_s=600, te="", nccl_rules=False)
        checked_job(4, WORKER, [*args, *layouts], timeout_s=3600, te="", nccl_rules=False)
        found.append(rank_reports(out, 4)[0])
        for layout, report in found[-1].items():
            check(layout, report["errors"])
    return found


def rows(steps: Steps, reports: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The table's rows of one model."""
    made = []
    for layout, own in reports.items():
        seconds, simulated = own["seconds"], own["simulated"]
        made.append(
            [
                steps.model,
                layout.replace("_", " "),
                f"{own['microbatches']}",
                f"{own['uses']}",
                f"{own['images']}",
                f"{seconds['row']:.2f}",
                f"{simulated['row']:.2f}",
                f"{seconds['ahead']:.2f}",
                f"{simulated['ahead']:.2f}",
                f"{own['ratio']:.3f}",
                f"{simulated['row'] / simulated['ahead']:.3f}",
                f"{own['late']:.1%}",
                f"{max(own['errors'].values()):.0e}",
            ]
        )
    return made


def what(steps: Steps) -> str:
    """What was measured."""
    return (
        f"Real steps over gloo of a toy of Qwen3-VL with 8 layers, {steps.prompts} prompts of "
        f"{steps.group} samples\nwith the same image, of the trace of {steps.trace} with a quarter "
        "of its tokens and patches. Each forward,\nbackward and call of the tower sleeps until "
        f"{steps.slow:g} times the seconds are over that it takes of a real model\non an H100, as "
        "four processes share cores. In rows: each sample's images are encoded in its row on "
        'the\nfirst stage, planned with `Policy(images="row")`; ahead: each different image once, '
        "on one of all ranks.\nM: micro-batches ahead. Seconds: the median of "
        f"{steps.rounds} steps, and of their ratios. Simulated: by the cost\nmodel that a run's "
        "online calibration makes of the steps ahead. Late: seconds that the work of a rank's\n"
        "operations took beyond those given, over all. Gradients: the largest relative difference, "
        "of tower or\ndecoder, between the two ways and a single process."
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="of 4 processes")
    parser.add_argument("--trace", choices=TRACES, default="photos")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--slow", type=float, default=8.0, help="seconds for one of an H100")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measured", action="store_true", help="write docs/measured as well")
    options = parser.parse_args()
    sizes = {
        n: getattr(options, n) for n in ("trace", "prompts", "group", "budget", "slow", "rounds")
    }
    steps = [Steps(model=model, **sizes) for model in options.models]
    with tempfile.TemporaryDirectory() as folder:
        found = run(steps, options.layouts, Path(folder))
    body = table(HEAD, [row for pair in zip(steps, found, strict=True) for row in rows(*pair)])
    print(body)
    if options.measured:
        versions = ", ".join(f"{name} {version(name)}" for name in ("megatron-core", "torch"))
        measured.write("images_cpu", TITLE, what(steps[0]), [body], f"{versions}, {machine()}")


if __name__ == "__main__":
    main()
