"""Packing strategies of other schedulers, reimplemented here for comparison.

A strategy gets lengths, work, a layout and a budget per row. It returns the micro-batches of each
rank in order, each as a list of samples. As the originals do, they count tokens and round M up to a
multiple of G.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megapack import Layout
from megapack.outlook import baselines
from megapack.outlook.baselines import Ranks, Rows, aligned_rows, in_turn
from tools.benching.karmarkar_karp import karmarkar_karp


def next_fit(lengths: np.ndarray, work: np.ndarray, layout: Layout, budget: int) -> Ranks:
    """Next-fit in input order, the last rows split to a legal count, rows to ranks round-robin."""
    return baselines.next_fit(lengths, layout, budget)


def first_fit(lengths: np.ndarray, work: np.ndarray, layout: Layout, budget: int) -> Ranks:
    """First-fit in input order, heaviest rows split to a legal count, Karmarkar-Karp over ranks."""
    return _first_fit_karmarkar(lengths, lengths, layout, budget)


def first_fit_flops(lengths: np.ndarray, work: np.ndarray, layout: Layout, budget: int) -> Ranks:
    """As `first_fit`, with ranks balanced by work instead of tokens."""
    return _first_fit_karmarkar(lengths, work, layout, budget)


def _first_fit_karmarkar(
    lengths: np.ndarray, weight: np.ndarray, layout: Layout, budget: int
) -> Ranks:
    rows: Rows = []
    loads: list[int] = []
    for i, size in enumerate(lengths.tolist()):
        row = next((r for r, load in enumerate(loads) if load + size <= budget), len(rows))
        if row == len(rows):
            rows.append([])
            loads.append(0)
        rows[row].append(i)
        loads[row] += size
    while len(rows) < aligned_rows(len(rows), layout):
        target = aligned_rows(len(rows), layout)
        while len(rows) < target:
            heaviest = max(
                range(len(rows)), key=lambda r: (len(rows[r]) > 1, lengths[rows[r]].sum())
            )
            half, other_half = karmarkar_karp(lengths[rows[heaviest]], 2)
            row = rows[heaviest]
            rows[heaviest] = [row[i] for i in half]
            rows.append([row[i] for i in other_half])
    weights = np.array([round(float(weight[row].sum())) for row in rows], dtype=np.int64)
    parts = karmarkar_karp(weights, layout.dp, equal_size=True)
    return [[rows[r] for r in part] for part in parts]


def karmarkar_per_rank(lengths: np.ndarray, work: np.ndarray, layout: Layout, budget: int) -> Ranks:
    """Karmarkar-Karp by work over ranks, then over micro-batches; the small ones at both ends.

    The budget is soft: a row may exceed it.
    """
    weight = np.round(work).astype(np.int64)
    even = lengths.size % layout.dp == 0
    ranks = karmarkar_karp(weight, layout.dp, equal_size=even)
    count = max(-(-int(lengths[part].sum()) // budget) for part in ranks)
    count = layout.next_legal_count(count, "multiple")
    out: Ranks = []
    for part in ranks:
        # The original refuses a rank with fewer samples than rows.
        filled = min(count, len(part))
        rows = [[part[i] for i in row] for row in karmarkar_karp(weight[part], filled)]
        rows += [[] for _ in range(count - filled)]
        rows.sort(key=lambda row: -int(weight[row].sum()))
        out.append(rows[::2][::-1] + rows[1::2])
    return out


def modified_first_fit(lengths: np.ndarray, work: np.ndarray, layout: Layout, budget: int) -> Ranks:
    """Modified first-fit-decreasing (Johnson and Garey 1985), rows to ranks round-robin."""
    order = sorted(range(lengths.size), key=lambda i: -lengths[i])
    large = [i for i in order if 2 * lengths[i] > budget]
    medium = [i for i in order if budget < 3 * lengths[i] and 2 * lengths[i] <= budget]
    small = [i for i in order if budget < 6 * lengths[i] and 3 * lengths[i] <= budget]
    tiny = [i for i in order if 6 * lengths[i] <= budget]
    rows: Rows = [[i] for i in large]
    free = [budget - int(lengths[i]) for i in large]
    for row in range(len(rows)):
        at = next((k for k, i in enumerate(medium) if lengths[i] <= free[row]), None)
        if at is not None:
            free[row] -= int(lengths[medium[at]])
            rows[row].append(medium.pop(at))
    for row in reversed(range(len(rows))):
        if len(rows[row]) > 1 or len(small) < 2:
            continue
        if lengths[small[-1]] + lengths[small[-2]] > free[row]:
            continue
        first = small.pop()
        rows[row].append(first)
        free[row] -= int(lengths[first])
        second = next(k for k, i in enumerate(small) if lengths[i] <= free[row])
        free[row] -= int(lengths[small[second]])
        rows[row].append(small.pop(second))
    for i in sorted([*medium, *small, *tiny], key=lambda i: -lengths[i]):
        size = int(lengths[i])
        row = next((r for r, room in enumerate(free) if room >= size), None)
        if row is None:
            rows.append([])
            free.append(budget)
            row = len(rows) - 1
        rows[row].append(i)
        free[row] -= size
    target = aligned_rows(len(rows), layout)
    while len(rows) < target:
        largest = max(range(len(rows)), key=lambda r: (len(rows[r]), r))
        rows.append([rows[largest].pop()])
    return in_turn(rows, layout)


Strategy = Callable[[np.ndarray, np.ndarray, Layout, int], Ranks]

BASELINES: dict[str, Strategy] = {
    "next_fit": next_fit,
    "first_fit": first_fit,
    "first_fit_flops": first_fit_flops,
    "kk_per_rank": karmarkar_per_rank,
    "mffd": modified_first_fit,
}
"""Name -> strategy; only kk_per_rank may exceed the budget."""
