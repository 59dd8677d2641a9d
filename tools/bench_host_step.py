#!/usr/bin/env python
"""Compares CPU seconds of a host's own step with and without patches, in pairs.

    python tools/bench_host_step.py verl --layout pp=2
    python tools/bench_host_step.py slime --layout pp=2 --case fanout
    python tools/bench_host_step.py slime --layout "" --shared-prefixes
    python tools/bench_host_step.py slime --layout "" --shared-prefixes --patches megatron_core

Both ways run at the same time, each in a job of its own, and their steps take turns: a pair is two
steps of the same number, one after the other, so that other work of the machine meets both.

With --shared-prefixes both ways have the patches: eight answers of 512 tokens to each prompt of
512, with and without shared prefixes. With `--patches megatron_core` rows are the host's own, and
share prefixes at the call of the model alone: `PlannedSchedule(share_prefixes=True)`.

CPU seconds are those of all threads of all ranks, so that ranks which wait for each other or for
other work of the machine do not count. The first step of each job is left out: it compiles and
fills caches. "simulated" is the makespan of the rows that the host ran, by row tokens, per step.

--write puts the run's row into docs/measured/hosts_step.md, in place of an older one of the same
host and options.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import Layout, simulate
from megapack.plan.plan import MicroBatch, StepPlan
from tests.hosts.steps.job import Report, parse_layout, run_step, workers
from tests.toy import WIDTH_VARIABLE
from tools.host_matrix import version_of
from tools.hosting.sources import NoSource, source
from tools.pages import measured

# Of a job: steps of a wide model beside other work.
_TIMEOUT_S = 1800
_MOST_STEPS = 1000
# Hosts whose workers have the case "long", eight answers of 512 tokens to prompts of 512.
_LONG = {"slime", "miles"}
# The file of docs/measured, and the options that tell its rows apart.
_FILE = "hosts_step"
_ROW_OPTIONS = ("layout", "patches", "case", "baseline_patches", "baseline_case", "width")
_TABLE_HEAD = [
    "| host | options | M, with and without | ratio: median (range), pairs | date | commit |",
    "|---|---|---|---|---|---|",
]


def main() -> None:
    """Run the rounds and print a line per quantity."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("host", choices=workers())
    parser.add_argument("--layout", type=_layout_text, default="pp=2")
    parser.add_argument("--patches", default="", help="default: the host's own")
    parser.add_argument("--case", default="")
    parser.add_argument("--baseline-patches", default="", help='of the runs "without"')
    parser.add_argument("--baseline-case", help="default: that of --case")
    parser.add_argument("--shared-prefixes", action="store_true", help="8 answers of 512 to 512")
    parser.add_argument("--width", type=int, default=256, help="of the host's toy model")
    parser.add_argument("--steps", type=int, default=6, help="of each way in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"a row of docs/measured/{_FILE}.md")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first is left out")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.shared_prefixes:
        if args.host not in _LONG:
            parser.error(f"--shared-prefixes is for {', '.join(sorted(_LONG))}")
        args.case, args.baseline_case = "tokens+long+shared", "tokens+long"
        args.baseline_patches = args.patches or args.host
    try:
        folder_of_host = source(args.host)
    except NoSource as error:
        parser.error(str(error))
    os.environ[WIDTH_VARIABLE] = str(args.width)
    layout = parse_layout(args.layout)
    patches = args.patches.split(",") if args.patches else [args.host]
    baseline = args.baseline_patches.split(",") if args.baseline_patches else []
    baseline_case = args.case if args.baseline_case is None else args.baseline_case
    pairs: list[tuple[list[Step], list[Step]]] = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            run = partial(
                run_step,
                args.host,
                layout=args.layout,
                world=layout.world_size,
                steps=args.steps,
                timeout_s=_TIMEOUT_S,
            )
            patched, without = in_turns(
                Path(folder),
                partial(run, patches=patches, case=args.case),
                partial(run, patches=baseline, case=baseline_case),
            )
        steps = ([Step.of(report, i) for report in patched] for i in range(args.steps))
        steps_without = ([Step.of(report, i) for report in without] for i in range(args.steps))
        pairs += list(zip(steps, steps_without, strict=True))[1:]
    _print(layout, pairs)
    if args.write:
        host = f"{args.host} {version_of(folder_of_host) or ''}".strip()
        given = {name: getattr(args, name) for name in _ROW_OPTIONS}
        print(write_row(host, options_text(given, parser.get_default), pairs))


def options_text(given: Mapping[str, object], default: Callable[[str], object]) -> str:
    """Options as one types them, without those that have their default."""
    return " ".join(
        f"--{name.replace('_', '-')} {shlex.quote(str(value))}"
        for name, value in given.items()
        if value != default(name)
    )


def write_row(host: str, options: str, pairs: Sequence[tuple[list[Step], list[Step]]]) -> Path:
    """Put a run's row into the measured file, in place of that of the same host and options."""
    ratios = _ratios(pairs)
    counts = [sorted({len(way[0].row_tokens) for way in ways}) for ways in zip(*pairs, strict=True)]
    text = ", ".join(str(m[0]) if len(m) == 1 else f"{m[0]} to {m[-1]}" for m in counts)
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    made = f"{measured.today()} | {measured.commit()}"
    row = f"| {host} | {options} | {text} | {ratio}, {len(ratios)} | {made} |"
    path = measured.MEASURED / f"{_FILE}.md"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = [line for line in lines if line.startswith("| ")][1:]
    others = [line for line in rows if _row_key(line) != _row_key(row)]
    return measured.write(
        _FILE,
        "CPU seconds of hosts' steps with the patches",
        "CPU seconds of all ranks with the patches over those without, in pairs of steps after a "
        "first one. Each row is a run of the command with its host and options, and has its date "
        "and commit.",
        [*_TABLE_HEAD, *sorted([*others, row])],
        measured.versions("megatron-core", "torch"),
    )


def _row_key(row: str) -> tuple[str, str]:
    """A host without its version, and options."""
    host, options = row.split("|")[1:3]
    return host.split()[0], options.strip()


@dataclass(frozen=True)
class Step:
    """A step of one rank."""

    cpu_seconds: float
    row_tokens: list[int]
    """Empty where the worker does not note it."""
    layer_tokens: float | None
    """Mean over the steps of the job."""

    @classmethod
    def of(cls, report: Report, number: int) -> Step:
        """Step `number` of a rank's report."""
        rows = report.row_tokens[number] if number < len(report.row_tokens) else []
        total = report.more.get("layer_tokens")
        mean = None if total is None else total / len(report.more["cpu_seconds"])
        return cls(report.more["cpu_seconds"][number], rows, mean)


def in_turns(folder: Path, *jobs: Callable[..., list[Report]]) -> list[list[Report]]:
    """The reports of two jobs whose steps take turns, the second job's first.

    Args:
        jobs: take a folder and `turns`.
    """
    pipes = [str(folder / "turn0"), str(folder / "turn1")]
    for pipe in pipes:
        os.mkfifo(pipe)
    ends = [os.open(pipe, os.O_RDWR) for pipe in pipes]
    # Processes that fork nothing: each starts a server of jobs of its own.
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        running = {
            pool.submit(job, folder / f"job{i}", turns=(pipes[i], pipes[1 - i])): i
            for i, job in enumerate(jobs)
        }
        os.write(ends[1], b".")
        for done in as_completed(running):
            # The other job has all further turns.
            os.write(ends[1 - running[done]], b"." * _MOST_STEPS)
    for end in ends:
        os.close(end)
    return [future.result() for future in running]


def _layout_text(text: str) -> str:
    """The text, which must be a layout; workers get it as it is."""
    parse_layout(text)
    return text


def _print(layout: Layout, pairs: Sequence[tuple[list[Step], list[Step]]]) -> None:
    ratios = _ratios(pairs)
    print(
        f"CPU seconds of all ranks, with / without: {statistics.geometric_mean(ratios):.3f} "
        f"(geometric mean of {len(ratios)} pairs; {min(ratios):.3f} to {max(ratios):.3f}, median "
        f"{statistics.median(ratios):.3f})"
    )
    for name, steps in zip(("with", "without"), zip(*pairs, strict=True), strict=True):
        seconds = [*map(_cpu_seconds, steps)]
        text = f"{name}: {statistics.median(seconds):.3f} CPU seconds (least {min(seconds):.3f})"
        text += f", M={[len(step[0].row_tokens) for step in steps]}"
        if steps[0][0].layer_tokens is not None:
            text += f", {steps[0][0].layer_tokens:g} tokens in layers"
        if all(rank.row_tokens for step in steps for rank in step):
            work = statistics.mean(_simulated(step, layout) for step in steps)
            text += f", simulated {work:.1f} tokens of work"
        print(text)


def _ratios(pairs: Sequence[tuple[list[Step], list[Step]]]) -> list[float]:
    return [_cpu_seconds(patched) / _cpu_seconds(without) for patched, without in pairs]


def _cpu_seconds(step: Sequence[Step]) -> float:
    return sum(rank.cpu_seconds for rank in step)


def _simulated(ranks: Sequence[Step], layout: Layout) -> float:
    """Makespan of the step that the host ran, in tokens; model-parallel ranks have equal rows."""
    rows = list({tuple(rank.row_tokens): rank.row_tokens for rank in ranks}.values())
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
    return simulate(step, layout=layout).makespan


if __name__ == "__main__":
    main()
