"""What two runs of a soak must have in common, and what a run must not gather."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.soaking.job import Sample

WARMUP_STEPS = 200
MAX_GROWTH = 0.02
MIN_SAMPLES = 8
COUNTS = ("threads", "fds", "groups")
MEMORY = ("rss_mib", "uss_mib", "pss_mib")


def judge_steps(calm: Path, wild: Path, num_steps: int) -> list[str]:
    """Compare two runs' metrics, all numbers by their text but those of time.

    Args:
        calm, wild: the folders of an undisturbed run and a disturbed one.

    Returns:
        What differs or is missing, a line each.
    """
    expected, found = _lines(calm), _lines(wild)
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
    """Whether each life's ranks end with no more threads, files and process groups than it began.

    Args:
        run: names the run.

    Returns:
        What grew, a line each.
    """
    failed, seen = [], set()
    for life, rank in sorted({(sample.life, sample.rank) for sample in samples}):
        own = [s for s in samples if (s.life, s.rank) == (life, rank)]
        if len(own) < MIN_SAMPLES:
            continue
        for name in COUNTS:
            # A file that is open for a moment is in one sample; what leaks is in all later ones.
            few = len(own) // 4
            first, last = (min(getattr(s, name) for s in part) for part in (own[:few], own[-few:]))
            seen.add((rank, name, first, last))
            if last > first:
                who = f"{run}, life {life}, rank {rank}"
                failed.append(f"{who}: {name} grew from {first} to {last}")
    print(f"\n{run}: least of the first and of the last quarter of a life")
    for rank, name, first, last in sorted(seen):
        print(f"  rank {rank} {name:8} {first:5} {last:5}")
    return failed


def judge_memory(samples: Sequence[Sample], num_steps: int) -> list[str]:
    """Whether the ranks of a single life held their memory after the warm-up.

    Returns:
        What grew, a line each; nothing in a run of less than two warm-ups.
    """
    failed = []
    warm = min(WARMUP_STEPS, num_steps // 2)
    print(f"\nMiB after {warm} steps and at the end, on a fitted line:")
    for rank in sorted({sample.rank for sample in samples}):
        own = [s for s in samples if s.rank == rank and s.step >= warm]
        for name in MEMORY:
            first, last = trend([(s.step, getattr(s, name)) for s in own])
            growth = last / first - 1
            print(f"  rank {rank} {name:8} {first:8.1f} {last:8.1f}  {growth:+.2%}")
            # PSS is shown alone: it grows where a stranger who shared pages ends.
            judged = name != "pss_mib" and num_steps >= 2 * WARMUP_STEPS
            if judged and growth > MAX_GROWTH:
                failed.append(f"rank {rank}: {name} grew by {growth:.2%}")
    return failed


def trend(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The least-squares line's values at the first and the last place.

    >>> [round(value, 9) for value in trend([(0, 1.0), (1, 3.0), (2, 2.0), (3, 4.0)])]
    [1.3, 3.7]
    """
    places, values = np.array(points, dtype=float).T
    slope, height = np.polyfit(places, values, 1)
    return float(height + slope * places[0]), float(height + slope * places[-1])


def fault_table(struck: Sequence[dict[str, Any]]) -> str:
    """One line for each fault and what came of it."""
    lines = ["life  step fault                  rank seconds exit  goes on after"]
    for one in struck:
        code, resumed = ("-" if one.get(k) is None else one[k] for k in ("exit_code", "resumed"))
        lines.append(
            f"{one['life']:4} {one['step']:5} {one['kind']:22} {one['rank']:4} "
            f"{one['seconds']:7.1f} {code:>4}  {resumed:>13}"
        )
    return "\n".join(lines)


def _lines(folder: Path) -> list[dict[str, str]]:
    """Metrics by step, numbers as they are written, without those that time gives."""
    text = (folder / "runs/run/metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line, parse_float=str, parse_int=str) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if not _of_time(k)} for line in lines]


def _of_time(key: str) -> bool:
    return key.endswith("_s") or key.startswith("tokens_per_second")


def _differences(one: dict[str, str], other: dict[str, str]) -> Iterator[str]:
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            yield f"step {one['step']}: {key} is {other.get(key)}, undisturbed {one.get(key)}"
