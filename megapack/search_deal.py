"""Rows to ranks, and the order of a rank's rows."""

from __future__ import annotations

import numpy as np

from megapack.inputs import Floats, Ints
from megapack.jit import kernel
from megapack.packing_balance import pack_to_targets
from megapack.packing_kk import karmarkar_karp
from megapack.search_problem import PADDING

# More rows or samples are dealt: differencing keeps a tuple of all ranks per rows / ranks.
_MAX_DIFFERENCED = 4096


def deal(row_work: Floats, counts: Ints, *, in_rounds: bool = False) -> list[Ints]:
    """Rows to ranks of about equal work.

    Karmarkar-Karp where ranks get equally many, else the heaviest row first to the rank of least
    work that has room.

    With fewer rows than places, ranks get shares of real rows that differ by one at most, so that
    no rank has only padding while another has two rows.

    Args:
        row_work: float64 [R].
        counts: int64 [dp], places of each rank; at least R in all.
        in_rounds: every rank takes one row of each dp that follow each other by weight, so that
            the k-th rows of all ranks are alike: for ranks that meet at every micro-batch.

    Returns:
        Per rank its rows, heaviest first.
    """
    order = np.argsort(-row_work, kind="stable")
    quota = _quotas(counts, row_work.size)
    if not in_rounds and row_work.size <= _MAX_DIFFERENCED and np.all(quota == quota[0]):
        return _differenced(row_work, order, counts.size)
    rank_of = _deal(row_work, order, quota, counts.size if in_rounds else 0)
    by_rank = order[np.argsort(rank_of[order], kind="stable")]
    return np.split(by_rank, np.cumsum(quota)[:-1])


def _differenced(row_work: Floats, order: Ints, num_ranks: int) -> list[Ints]:
    """Karmarkar-Karp with equally many rows for each rank: sums are nearer than by dealing."""
    rank_of = np.empty(row_work.size, dtype=np.int64)
    for rank, rows in enumerate(karmarkar_karp(_units(row_work), num_ranks, equal_size=True)):
        rank_of[rows] = rank
    return [order[rank_of[order] == rank] for rank in range(num_ranks)]


def deal_samples(
    sizes: Ints, work: Floats, num_ranks: int, count: int, capacity: int
) -> Ints | None:
    """Samples to ranks of about equal work by Karmarkar-Karp, then each rank's into rows.

    Args:
        sizes: int64 [n], padded tokens.
        work: float64 [n].
        count: rows of each rank.
        capacity: tokens per row.

    Returns:
        row_of: int64 [n], rank r has the rows from r * count on; None where they do not fit or are
        too few or too many to be differenced.
    """
    if not num_ranks <= sizes.size <= _MAX_DIFFERENCED:
        return None
    row_of = np.empty(sizes.size, dtype=np.int64)
    for rank, part in enumerate(karmarkar_karp(_units(work), num_ranks, equal_size=False)):
        samples = np.array(part, dtype=np.int64)
        targets = np.full(count, float(np.cumsum(work[samples])[-1]) / count)
        rows = pack_to_targets(sizes[samples], work[samples], targets, capacity)
        if rows is None or samples.size < count:
            return None
        row_of[samples] = rank * count + rows
    return row_of


def _units(work: Floats) -> Ints:
    """Whole numbers in proportion to work: sums of floats would depend on their order."""
    largest = float(work.max())
    # A cost model of zeros weighs nothing.
    scaled = work / largest if largest > 0 else np.zeros(work.size)
    return np.round(scaled * 2**40).astype(np.int64)


def _quotas(counts: Ints, num_rows: int) -> Ints:
    """Real rows per rank: its places, or where rows run out an equal share of them."""
    quota = counts.copy()
    missing = int(counts.sum()) - num_rows
    while missing > 0:
        # Take from the ranks that have most, the last ones first.
        most = int(quota.max())
        top = np.flatnonzero(quota == most)
        below = quota[quota < most]
        step = most - int(below.max()) if below.size else most
        whole = min(step, missing // top.size)
        if whole == 0:
            quota[top[top.size - missing :]] -= 1
            break
        quota[top] -= whole
        missing -= whole * top.size
    return quota


@kernel
def _deal(row_work: Floats, order: Ints, quota: Ints, round_size: int) -> Ints:
    num_ranks = quota.size
    rank_of = np.empty(order.size, dtype=np.int64)
    load = np.zeros(num_ranks)
    taken = np.zeros(num_ranks, dtype=np.int64)
    for place in range(order.size):
        best = -1
        for rank in range(num_ranks):
            if taken[rank] >= quota[rank]:
                continue
            if round_size > 0 and taken[rank] > place // round_size:
                continue
            if best < 0 or (load[rank], taken[rank]) < (load[best], taken[best]):
                best = rank
        rank_of[order[place]] = best
        load[best] += row_work[order[place]]
        taken[best] += 1
    return rank_of


def place_by_target(rows: Ints, targets: Floats) -> Ints:
    """A rank's rows in pipeline order: the heaviest where the target is largest.

    Places of equal target fill from the middle, so that what is small stands first and last.

    Args:
        rows: heaviest first; fewer than places leave PADDING at the smallest targets.
        targets: float64 [M].

    Returns:
        int64 [M].
    """
    count = targets.size
    place = np.arange(count)
    from_end = np.minimum(place, count - 1 - place)
    order = np.lexsort((place, -from_end, -targets))
    out = np.full(count, PADDING, dtype=np.int64)
    out[order[: rows.size]] = rows
    return out
