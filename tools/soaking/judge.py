"""Checks of a soak: both runs take the same steps, and no resource grows within a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.soaking.job import Sample

# Chosen by hand: memory settles in the first steps, and growth of 2 % after them counts as a leak.
WARMUP_STEPS = 200
MAX_GROWTH = 0.02
# Fewer samples of a life do not give quarters to compare.
MIN_SAMPLES = 8
COUNTS = ("threads", "fds", "groups")
MEMORY = ("rss_mib", "uss_mib", "pss_mib")


def judge_steps(calm: Path, wild: Path, num_steps: int) -> list[str]:
    """Compare two runs' metrics digit by digit, except for times.

    Args:
        calm, wild: the folders of an undisturbed run and a disturbed one.

    Returns:
        One line for each difference; at most 10.
    """
    expected = _lines(calm)
    found = _lines(wild)
    failed = [
        f"{folder.name}: {len(lines)} lines of metrics are not steps 1 to {num_steps} once each"
        for folder, lines in ((calm, expected), (wild, found))
        if [line["step"] for line in lines] != [str(n + 1) for n in range(num_steps)]
    ]
    if not failed:
        pairs = zip(expected, found, strict=True)
        failed = [text for one, other in pairs for text in _differences(one, other)]
        keys = ", ".join(sorted(expected[0]))
        print(f"\nsteps: {num_steps}, {len(failed)} differences in {keys}")
    return failed[:10]


def judge_counts(run: str, samples: Sequence[Sample]) -> list[str]:
    """Check that no rank ends a life with more threads, files or process groups than it began with.

    Args:
        run: name of the run for messages.

    Returns:
        One line for each count that grew.
    """
    failed = []
    seen = set()
    for life, rank in sorted({(sample.life, sample.rank) for sample in samples}):
        own = [s for s in samples if (s.life, s.rank) == (life, rank)]
        if len(own) < MIN_SAMPLES:
            continue
        for name in COUNTS:
            # Compare minima of the first and last quarter: a file that is open for a moment is in
            # one sample, a leaked one is in all later samples.
            few = len(own) // 4
            first, last = (min(getattr(s, name) for s in part) for part in (own[:few], own[-few:]))
            seen.add((rank, name, first, last))
            if last > first:
                who = f"{run}, life {life}, rank {rank}"
                failed.append(f"{who}: {name} grew from {first} to {last}")
    print(f"\n{run}: minimum over the first and over the last quarter of a life")
    for rank, name, first, last in sorted(seen):
        print(f"  rank {rank} {name:8} {first:5} {last:5}")
    return failed


def judge_memory(samples: Sequence[Sample], num_steps: int) -> list[str]:
    """Check that the memory of the ranks of a single life does not grow after the warm-up.

    Returns:
        One line for each measure that grew; empty for a run shorter than two warm-ups.
    """
    failed = []
    print(f"\nMiB after {warm_up(num_steps)} steps and at the end, on a fitted line:")
    for rank, name, first, last in memory_trends(samples, num_steps):
        growth = last / first - 1
        print(f"  rank {rank} {name:8} {first:8.1f} {last:8.1f}  {growth:+.2%}")
        # PSS is printed but not judged: it grows when another process that shared pages ends.
        judged = name != "pss_mib" and num_steps >= 2 * WARMUP_STEPS
        if judged and growth > MAX_GROWTH:
            failed.append(f"rank {rank}: {name} grew by {growth:.2%}")
    return failed


def warm_up(num_steps: int) -> int:
    """Steps after which memory is compared with that of the end."""
    return min(WARMUP_STEPS, num_steps // 2)


def memory_trends(
    samples: Sequence[Sample], num_steps: int
) -> Iterator[tuple[int, str, float, float]]:
    """Each rank and measure of memory, with its MiB after the warm-up and at the end."""
    for rank in sorted({sample.rank for sample in samples}):
        own = [s for s in samples if s.rank == rank and s.step >= warm_up(num_steps)]
        for name in MEMORY:
            yield rank, name, *trend([(s.step, getattr(s, name)) for s in own])


def summary(
    struck: Sequence[dict[str, Any]], samples: Sequence[Sample], num_steps: int
) -> list[tuple[str, str]]:
    """Rows of docs/measured/soak.md, of runs that passed all checks.

    Args:
        struck: the faults of the disturbed run.
        samples: of the undisturbed run.
    """
    kinds = sorted({one["kind"] for one in struck})
    again = [one["step"] - one["resumed"] for one in struck if "resumed" in one]
    rows = [
        ("faults", f"{len(struck)} of {len(kinds)} kinds: {', '.join(kinds)}"),
        ("steps that differ from those of the run without faults", f"0 of {num_steps:,}"),
        ("most steps run again after a fault", str(max(again, default=0))),
    ]
    for name in MEMORY:
        grown = [b / a - 1 for _, of, a, b in memory_trends(samples, num_steps) if of == name]
        what = f"growth of {name.removesuffix('_mib').upper()} of a rank after the warm-up"
        rows.append((what, f"{min(grown):+.2%} to {max(grown):+.2%}"))
    rows.append(("threads, file descriptors and process groups of a rank", "no growth"))
    return rows


def trend(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The values of the least-squares line at the first and the last point.

    >>> [round(value, 9) for value in trend([(0, 1.0), (1, 3.0), (2, 2.0), (3, 4.0)])]
    [1.3, 3.7]
    """
    steps, values = np.array(points, dtype=float).T
    slope, height = np.polyfit(steps, values, 1)
    return float(height + slope * steps[0]), float(height + slope * steps[-1])


def fault_table(struck: Sequence[dict[str, Any]]) -> str:
    """A table with one line per fault: when it struck, and how the job ended and resumed."""
    lines = ["life  step fault                  rank seconds exit  resumed after"]
    for one in struck:
        code, resumed = ("-" if one.get(k) is None else one[k] for k in ("exit_code", "resumed"))
        lines.append(
            f"{one['life']:4} {one['step']:5} {one['kind']:22} {one['rank']:4} "
            f"{one['seconds']:7.1f} {code:>4}  {resumed:>13}"
        )
    return "\n".join(lines)


def _lines(folder: Path) -> list[dict[str, str]]:
    """Metrics of each line, with numbers as text and without times."""
    text = (folder / "runs/run/metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line, parse_float=str, parse_int=str) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if not _is_timing(k)} for line in lines]


def _is_timing(key: str) -> bool:
    return key.endswith("_s") or key.startswith("tokens_per_second")


def _differences(one: dict[str, str], other: dict[str, str]) -> Iterator[str]:
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            yield f"step {one['step']}: {key} is {other.get(key)}, undisturbed {one.get(key)}"
