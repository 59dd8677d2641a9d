"""The tables of steps of about equal work: the spread of step times, and what it does to batches.

Samples are shuffled and cut into batches as the main job does it under `data.balance_window`, each
sample a prompt group of its own, and each batch one optimizer step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from megapack import CostModel, Layout, build_dp_schedule, check_plan, simulate
from megapack.job.data.rollouts import group_batches

# Samples of a step, and the fewest steps of a cell.
SAMPLES = 128
STEPS = 48
# None: all batches of an epoch.
WINDOWS = (1, 2, 4, 16, None)
# The part of the samples that the second table calls long, and the one that it calls longest.
LONG = 0.1
LONGEST = 0.01


class Way(NamedTuple):
    """How steps run."""

    layout: Layout
    cost: CostModel


def steps_tables(
    data: Mapping[str, tuple[np.ndarray, int]], ways: Mapping[str, Way], per_square: float
) -> Iterator[str]:
    """Yield the lines of both tables.

    Args:
        data: lengths and budget of each trace.
        ways: by the name of a row.
        per_square: work of a squared token over that of a token.
    """
    names = [f"w={window or 'all'}" for window in WINDOWS]
    yield f"| data | layout | {' | '.join(names)} |"
    yield "|---" * (2 + len(names)) + "|"
    rows = []
    for name, (lengths, budget) in data.items():
        work = np.rint(lengths + lengths.astype(float) ** 2 * per_square).astype(np.int64)
        drawn = [_batches(lengths, work, window) for window in WINDOWS]
        by_tokens = [_batches(lengths, lengths, window) for window in WINDOWS]
        for kind, batches in (("work", drawn), ("work, balanced by tokens", by_tokens)):
            cells = [f"{_spread(work[own].sum(axis=1)):.1%}" for own in batches]
            yield f"| {name} | {kind} | {' | '.join(cells)} |"
        for kind, way in ways.items():
            seconds = [[_seconds(lengths[own], budget, way) for own in each] for each in drawn]
            usual = statistics.fmean(seconds[0])
            cells = [f"{_spread(s):.1%}, {statistics.fmean(s) / usual:.3f}" for s in seconds]
            yield f"| {name} | {kind} | {' | '.join(cells)} |"
        cells = [_composition(lengths, own) for own in drawn]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    yield from ["", f"| data | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|", *rows]


def _batches(lengths: np.ndarray, work: np.ndarray, window: int | None) -> np.ndarray:
    """The full batches of some epochs: [batches, samples]."""
    num_full = lengths.size // SAMPLES
    found: list[np.ndarray] = []
    for epoch in range(-(-STEPS // num_full)):
        batches = group_batches(
            np.arange(lengths.size),
            SAMPLES,
            shuffle=True,
            epoch=epoch,
            work=work,
            window=window or num_full,
        )
        found += list(batches)[:num_full]
    return np.array(found)


def _seconds(lengths: np.ndarray, budget: int, way: Way) -> float:
    plan = build_dp_schedule(lengths, layout=way.layout, max_tokens_per_gpu=budget, cost=way.cost)
    check_plan(plan, lengths)
    return float(simulate(plan.steps[0], layout=way.layout, cost=way.cost).makespan)


def _spread(values: np.ndarray | list[float]) -> float:
    """Standard deviation over mean."""
    return float(np.std(values) / np.mean(values))


def _composition(lengths: np.ndarray, batches: np.ndarray) -> str:
    """The standard deviation of a batch's number of long samples, and the mean length of samples
    that are in a batch with one of the longest, over that of all others."""
    own = lengths[batches]
    num_long = (own >= np.quantile(lengths, 1 - LONG)).sum(axis=1)
    is_longest = own >= np.quantile(lengths, 1 - LONGEST)
    others = np.where(is_longest, 0, own)
    means = others.sum(axis=1) / (~is_longest).sum(axis=1)
    beside = float(np.average(means, weights=is_longest.sum(axis=1)))
    return f"{num_long.std():.1f}, {beside / float(own[~is_longest].mean()):.2f}"
