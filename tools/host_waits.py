"""Count where steps would wait for a GPU, over layouts and features; writes docs/gpu.md.

    python tools/host_waits.py [--cases PATTERN]

Runs the cases of `tests/dist/schedule/wait_cases.py` and the main job as on GPUs, under the ledger
of devices of `tests/rehearsal`, on 1 and 2 processes over gloo. Needs `tools/te_python.sh`. The
exit code is 1 if tensors are at a wrong place. With a pattern only those cases run, and the table
is printed.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.dist.schedule.wait_cases import ALL_CASES, LAYOUTS  # noqa: E402
from tests.dist.schedule.wait_results import (  # noqa: E402
    PASSES,
    SIZES,
    Counted,
    run_wait_cases,
    run_wait_job,
)
from tools.pages.marks import put_between, table  # noqa: E402

PAGE = ROOT / "docs" / "gpu.md"
MARKS = ("<!-- waits -->", "<!-- end of waits -->")
JOBS = {"calibrate: off": (), "online": ("plan.calibrate=online", "plan.calibrate_interval=1")}
_LAYOUT_NAMES = {layout: name for name, layout in LAYOUTS.items()}

REASONS = {
    "megapack/model/experts/model.py:metrics": "metrics of the experts' losses",
    "megapack/model/experts/rows.py:collect_routing": "recorded routes go to the host",
    "megapack/ranks/agree.py:_all_agree": "ranks agree before they write or go on",
    "megapack/ranks/agree.py:on_any_rank": "has a rank failed, or a signal to stop",
    "megapack/rows/outputs.py:scatter_to_samples": "log-probs, entropies go to the host",
    "megapack/rows/outputs.py:reduce_metrics": "the step's loss and metrics",
    "megapack/schedule/faults.py:_origins_on_all": "is a value of any rank NaN or infinite",
    "megapack/job/train/calibrator.py:_fitted": "rank 0's cost model for all",
    "megapack/job/train/calibrator.py:_summed": "seconds of all ranks' operations",
    "megapack/job/train/metrics.py:memory_peaks": "peaks of all ranks' memory, a metric",
    "megapack/job/train/passes.py:gradients": "the step's measured seconds",
    "megatron/core/distributed/finalize_model_grads.py:finalize_model_grads": (
        "loss tokens, per model chunk"
    ),
    "megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32": (
        "the gradient norm, for dense weights and for experts"
    ),
    "megatron/core/transformer/moe/moe_utils.py:permute": "without fused permutation",
    "megatron/core/transformer/moe/token_dispatcher.py:_maybe_dtoh_and_synchronize": (
        "tokens of each expert, per layer"
    ),
    "megatron/core/utils.py:local_multi_tensor_l2_norm": "norms without fused kernels",
}
"""What a place waits for."""


def main() -> int:
    """Run the cases, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="*", help="a pattern of names; default: all, written")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = run_wait_cases(fnmatch.filter(ALL_CASES, args.cases), Path(folder))
    tables = [cases_table(results), places_table(results)]
    jobs = {}
    if args.cases == "*":
        for name, overrides in JOBS.items():
            with tempfile.TemporaryDirectory() as folder:
                jobs[name] = run_wait_job(Path(folder), *overrides)
        tables.append(job_table(jobs))
        page = put_between(PAGE.read_text(encoding="utf-8"), MARKS, "\n\n".join(tables))
        PAGE.write_text(page, encoding="utf-8")
    else:
        print("\n\n".join(tables))
    counts = {**results, **jobs}
    faults = [f"{name}: {fault}" for name, counted in counts.items() for fault in counted.faults]
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


def cases_table(results: Mapping[str, Counted]) -> str:
    """A line per feature and number of waits: those of each pass, and of each further row."""
    lines: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for name, counted in results.items():
        case = ALL_CASES[name]
        few, many = (facts["rows"] for facts in counted.facts)
        cells = []
        slopes = []
        for pass_ in PASSES:
            counts = [counted.of("wait", f"{size} {pass_}").total() for size in SIZES]
            slopes.append((counts[1] - counts[0]) / (many - few))
            cells.append(f"{counts[0] - slopes[-1] * few:g}")
        key = (case.feature, *cells, f"{max(slopes):g}")
        kernels, layouts = lines.setdefault(key, ([], []))
        kernels.append(f"`{case.attention}`")
        layouts.append(f"`{_LAYOUT_NAMES[case.layout]}`")
    rows = [
        [feature, _unique(kernels), _unique(layouts), *counts]
        for (feature, *counts), (kernels, layouts) in sorted(lines.items())
    ]
    header = "feature, attention, layouts, log-prob pass, step, update, per further row"
    return table(header.split(", "), rows)


def places_table(results: Mapping[str, Counted]) -> str:
    """A line per place that waits: in which passes, and what for."""
    cases: Counter[str] = Counter()
    passes: dict[str, list[str]] = {}
    grows: set[str] = set()
    for counted in results.values():
        found = {pass_: counted.of("wait", f"{SIZES[1]} {pass_}") for pass_ in PASSES}
        cases.update({place for places in found.values() for place in places})
        for pass_, places in found.items():
            grows |= counted.grows(pass_)
            for place in places:
                passes.setdefault(place, []).append(pass_)
    rows = [
        [
            *_described(place),
            ", ".join(pass_ for pass_ in PASSES if pass_ in passes[place]),
            "per row" if place in grows else "per pass",
            str(number),
        ]
        for place, number in sorted(cases.items(), key=lambda item: (-item[1], item[0]))
    ]
    return table(["place", "wait", "for", "in", "how often", "cases"], rows)


def job_table(jobs: Mapping[str, Counted]) -> str:
    """A line per place that waits in a phase of the main job: how often per step."""
    rows = []
    for phase in ("batch", "log-probs", "step"):
        counts = [counted.of("wait", phase) for counted in jobs.values()]
        places = {place: None for count in counts for place in count}
        rows += [
            [phase, *_described(place)]
            + [
                f"{count[place] / len(counted.facts):g}"
                for count, counted in zip(counts, jobs.values(), strict=True)
            ]
            for place in places
        ]
    return table(["phase", "place", "wait", "for", *jobs], rows)


def _described(place: str) -> list[str]:
    """The place, the operation, and what it is for."""
    where, what = place.split(": ")
    file, function = where.split(":")
    return [f"`{file}`, `{function}`", what, REASONS.get(where, "")]


def _unique(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(main())
