#!/usr/bin/env python
"""Times a host's own step on a CPU with and without patches, in turn, and prints the ratio.

    python tools/bench_host_step.py slime --layout pp=2 --patches slime,slime_loss
    python tools/bench_host_step.py slime --layout "" --case tokens+long+shared \
        --baseline-case tokens+long --baseline-patches slime    # shared prefixes

Each round runs the host's worker (tests/hosts/steps/HOST.py) without patches and then with them.
The first step of a run is left out: it compiles and fills caches. "simulated" is the makespan of
the rows that the host ran, by row tokens, per step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import Layout, simulate
from megapack.plan.plan import MicroBatch, StepPlan
from tests.hosts.steps.job import Report, parse_layout, run_step, workers
from tools.hosting.sources import NoSource, source


def main() -> None:
    """Run the rounds and print a line per quantity."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("host", choices=workers())
    parser.add_argument("--layout", type=_layout_text, default="pp=2")
    parser.add_argument("--patches", default="", help="default: the host's own and megatron_core")
    parser.add_argument("--case", default="")
    parser.add_argument("--baseline-patches", default="", help='of the runs "without"')
    parser.add_argument("--baseline-case", help="default: that of --case")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first is left out")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        source(args.host)
    except NoSource as error:
        parser.error(str(error))
    layout = parse_layout(args.layout)
    world = layout.dp * layout.tp * layout.pp * layout.cp
    patches = args.patches.split(",") if args.patches else [args.host, "megatron_core"]
    baseline = args.baseline_patches.split(",") if args.baseline_patches else []
    baseline_case = args.case if args.baseline_case is None else args.baseline_case
    chosen = {"without": (baseline, baseline_case), "with": (patches, args.case)}
    runs: dict[str, list[list[Report]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for name, (patches, case) in chosen.items():
                runs[name].append(
                    run_step(
                        args.host,
                        Path(folder) / f"{name}{number}",
                        layout=args.layout,
                        world=world,
                        patches=patches,
                        steps=args.steps,
                        case=case,
                    )
                )
    _print(layout, runs["without"], runs["with"], args.steps)


def _layout_text(text: str) -> str:
    """The text, which must be a layout; workers get it as it is."""
    parse_layout(text)
    return text


def _print(
    layout: Layout, without: list[list[Report]], patched: list[list[Report]], steps: int
) -> None:
    ratios = [_seconds(b) / _seconds(a) for a, b in zip(without, patched, strict=True)]
    print(
        f"step time, with / without: median {statistics.median(ratios):.3f} of {len(ratios)} "
        f"rounds ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    ratios = [_cpu_seconds(b) / _cpu_seconds(a) for a, b in zip(without, patched, strict=True)]
    print(
        f"CPU seconds of all ranks, with / without: median {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )
    for name, ranks in (("without", without[0]), ("with", patched[0])):
        exchanges = sum(rank.num_shape_exchanges for rank in ranks) / len(ranks) / steps
        print(f"{name}: {exchanges:g} exchanges of shapes per rank and step, M={_counts(ranks)}")
        if "layer_tokens" in ranks[0].more:
            print(f"{name}: {ranks[0].more['layer_tokens'] / steps:g} tokens in layers per step")
        if all(rank.row_tokens for rank in ranks):
            work = _simulated(ranks, layout) / steps
            print(f"{name}: simulated {work:.1f} tokens of work per step")


def _seconds(ranks: Sequence[Report]) -> float:
    return statistics.median(ranks[0].step_seconds[1:])


def _cpu_seconds(ranks: Sequence[Report]) -> float:
    return sum(statistics.median(rank.more["cpu_seconds"][1:]) for rank in ranks)


def _counts(ranks: Sequence[Report]) -> list[int]:
    return ranks[0].num_microbatches


def _simulated(ranks: Sequence[Report], layout: Layout) -> float:
    """Makespans of the steps that the host ran, in tokens; model-parallel ranks have equal rows."""
    replicas = {tuple(map(tuple, rank.row_tokens)): rank.row_tokens for rank in ranks}
    total = 0.0
    for rows in zip(*replicas.values(), strict=True):
        micro_batches = tuple(
            tuple(
                MicroBatch(samples=(i,), tokens=n, padded_tokens=n, row_tokens=n, tokens_sq=n * n)
                for i, n in enumerate(rank)
            )
            for rank in rows
        )
        step = StepPlan(
            ranks=micro_batches,
            num_microbatches=len(rows[0]),
            group_size=layout.microbatch_group_size or (layout.pp if layout.vpp > 1 else None),
            kept_rollouts=(),
            dropped_rollouts=(),
        )
        total += simulate(step, layout=layout).makespan
    return total


if __name__ == "__main__":
    main()
