"""Plans of others on a plan's samples: simple packing, and other schedulers, reimplemented.

A `Strategy` returns the micro-batches of each DP rank as lists of samples; an empty list is a
padding micro-batch. M is rounded up to a multiple of G, as the originals do, by splitting rows.
Where there are too few samples for that the originals refuse; here padding micro-batches are added.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import CostModel
from megapack.errors import ConfigError
from megapack.layout import Layout
from megapack.plan.plan import MicroBatch, Plan, StepPlan

Rows = list[list[int]]
"""Samples of each micro-batch."""
Ranks = list[Rows]
"""Rows of each DP rank."""
Strategy = Callable[[Ints, Floats, Layout, int], Ranks]
"""Aligned tokens of the samples in input order, int64 [n]; their work in tokens, float64 [n]; the
layout; and the tokens that a row may have -> rows of each rank, equally many."""
# Of `karmarkar_karp`: sum, number of items and items, all negative.
_Set = tuple[int, int, tuple[int, ...]]


def naive_plans(plan: Plan, lengths: Ints) -> dict[str, Plan]:
    """Pack the samples of each step with simple strategies; returns a plan per strategy name.

    "next-fit" packs neighbours until the budget is full. "padded" does the same, but pads all
    samples of a micro-batch to the longest of them, as in rectangular batches. "one sample" has one
    sample per micro-batch. Colocated samples are not kept together.

    Args:
        lengths: int64 [n], as they were planned.
    """
    full = plan.capacity or plan.micro_batch_size or 0

    def pack(sizes: Ints, budget: int, pad: bool) -> Ranks:
        # Under micro_batch_size a budget counts samples.
        counted = sizes if plan.capacity else np.ones_like(sizes)
        return next_fit(counted, counted.astype(np.float64), plan.layout, budget, pad)

    ways = {"next-fit": (full, False), "padded": (full, True), "one sample": (0, False)}
    return {
        name: _packed(plan, lengths, partial(pack, budget=budget, pad=pad), pad)
        for name, (budget, pad) in ways.items()
    }


def peer_plans(plan: Plan, lengths: Ints, cost: CostModel, strategy: Strategy) -> dict[int, Plan]:
    """Pack the samples of each step as another scheduler does, under five budgets.

    Args:
        lengths: int64 [n], as they were planned.

    Returns:
        Tokens per GPU, see `budgets` -> the plan; that of the plan's own budget first.

    Raises:
        ConfigError: a plan without a budget.
    """
    layout, most = plan.layout, plan.max_tokens_per_gpu
    if most is None:
        raise ConfigError("other schedulers fill a budget of tokens; set max_tokens_per_gpu")

    def pack(sizes: Ints, n: int) -> Ranks:
        return strategy(sizes, sample_work(sizes, cost), layout, layout.longest_row(n * layout.cp))

    longest = -(-layout.padded_tokens([int(lengths.max())]) // layout.cp)
    return {n: _packed(plan, lengths, partial(pack, n=n)) for n in budgets(most, longest)}


def budgets(most: int, longest: int) -> list[int]:
    """Five budgets to try, falling from `most` to a quarter of it, or to the longest sample.

    >>> budgets(16384, 2000)
    [16384, 11585, 8192, 5793, 4096]
    """
    least = min(max(longest, most // 4), most)
    return sorted({round(budget) for budget in np.geomspace(most, least, 5)}, reverse=True)


def sample_work(sizes: Ints, cost: CostModel) -> Floats:
    """float64 [n]: the work of each sample, in tokens: the sum is that of the sizes."""
    work = cost.per_token * sizes + cost.per_token_sq * sizes.astype(np.float64) ** 2
    return work * (sizes.sum() / work.sum()) if work.any() else sizes.astype(np.float64)


def next_fit(sizes: Ints, work: Floats, layout: Layout, budget: int, pad: bool = False) -> Ranks:
    """Megatron-LM's: neighbours share rows, the last rows are split, rows to ranks in turn.

    Args:
        pad: samples of a row are padded to the longest of them.
    """
    rows: Rows = []
    count = total = longest = 0
    for i, size in enumerate(sizes.tolist()):
        count, total, longest = count + 1, total + size, max(longest, size)
        if rows and (count * longest if pad else total) <= budget:
            rows[-1].append(i)
        else:
            rows.append([i])
            count, total, longest = 1, size, size
    at = len(rows) - 1
    while at >= 0 and _missing(rows, layout):
        row = rows[at]
        if len(row) > 1:
            rows[at : at + 1] = [row[: len(row) // 2], row[len(row) // 2 :]]
        else:
            at -= 1
    return _in_turn(rows, layout)


def first_fit_flops(sizes: Ints, work: Floats, layout: Layout, budget: int) -> Ranks:
    """slime's under --balance-data: first-fit in input order, ranks of about equal work."""
    rows: Rows = [[] for _ in sizes]
    # A sample over the budget fills a row by itself.
    _first_fit(range(sizes.size), np.minimum(sizes, budget).tolist(), rows, budget)
    return _to_equal_ranks([row for row in rows if row], sizes, work, layout)


def kk_flops(sizes: Ints, work: Floats, layout: Layout, budget: int) -> Ranks:
    """slime's under --balance-by-flops: rows of about equal work, too; the budget is soft."""
    count = min(-(-int(sizes.sum()) // budget), sizes.size)
    return _to_equal_ranks(karmarkar_karp(work, count), sizes, work, layout)


def kk_per_rank(sizes: Ints, work: Floats, layout: Layout, budget: int) -> Ranks:
    """verl's: ranks of about equal work, then rows, small ones at both ends; the budget is soft."""
    ranks = karmarkar_karp(work, layout.dp, equal_size=sizes.size % layout.dp == 0)
    count = max(-(-int(sizes[part].sum()) // budget) for part in ranks)
    count = layout.next_legal_count(count, "multiple")
    out: Ranks = []
    for part in ranks:
        rows = [[part[i] for i in row] for row in karmarkar_karp(work[part], count)]
        rows.sort(key=lambda row: (float(work[row].sum()), row[:1]), reverse=True)
        out.append(rows[::2][::-1] + rows[1::2])
    return out


def mffd(sizes: Ints, work: Floats, layout: Layout, budget: int) -> Ranks:
    """NeMo-RL's: modified first-fit-decreasing (Johnson and Garey 1985), what is left into the
    emptiest row, rows to ranks in turn."""
    size = sizes.tolist()
    rising, falling = (np.argsort(sign * sizes, kind="stable").tolist() for sign in (1, -1))
    rows = [[i] for i in falling if 2 * size[i] > budget]
    medium = [i for i in falling if 2 * size[i] <= budget < 3 * size[i]]
    small = [i for i in rising if 3 * size[i] <= budget < 6 * size[i]]

    def fitting(items: list[int], row: list[int]) -> list[int]:
        left = budget - sum(size[i] for i in row)
        return [i for i in items if size[i] <= left]

    for row in rows:
        row.extend(fitting(medium, row)[:1])
        medium = [i for i in medium if i != row[-1]]
    for row in reversed(rows):
        second = fitting(small[1:], [*row, *small[:1]]) if len(row) == 1 else []
        if second:
            row.extend([small[0], second[-1]])
            small = [i for i in small if i not in row]
    placed = {i for row in rows for i in row}
    left = _first_fit((i for i in falling if i not in placed), size, rows, budget)
    # The emptiest first; of two, the one that has been so for longer.
    heap: list[tuple[int, int, list[int]]] = [(0, -1, [])]
    for k, i in enumerate(left):
        tokens, _, own = heapq.heappop(heap) if heap[0][0] + size[i] <= budget else (0, 0, [])
        heapq.heappush(heap, (tokens + size[i], k, [*own, i]))
    rows += [own for _, _, own in sorted(heap) if own]
    for row in sorted(rows, key=len)[::-1]:
        rows += [[row.pop()] for _ in range(min(_missing(rows, layout), len(row) - 1))]
    return _in_turn(rows, layout)


HOSTS: dict[str, tuple[str, dict[str, Strategy]]] = {
    "megatron_lm": ("--max-seqlen-per-dp-cp-rank", {"Megatron-LM": next_fit}),
    "slime": (
        "--max-tokens-per-gpu",
        {"slime --balance-data": first_fit_flops, "slime --balance-by-flops": kk_flops},
    ),
    # Its budget is that of a row before CP.
    "nemo_rl": ("train_mb_tokens/cp", {"NeMo-RL": mffd}),
    "verl": ("ppo_max_token_len_per_gpu", {"verl": kk_per_rank}),
}
"""Of other frameworks: what they call the budget, and their strategies by the names in tables."""


def karmarkar_karp(sizes: Floats, num_parts: int, *, equal_size: bool = False) -> Rows:
    """Partition items into `num_parts` parts of about equal sums (Karmarkar and Karp 1982).

    Multi-way as in Korf 2009: every item starts as a tuple of k sets, one of which holds it. The
    two tuples of largest spread (largest sum minus smallest) are merged, the largest set of one
    with the smallest set of the other, until one tuple is left. With k=2, the items 8, 7, 6 become
    (8 | 7), with spread 1, and then (6, 7 | 8). Ties are broken by sum, then by number of items,
    then by the items themselves, as in the packers of other frameworks.

    Args:
        sizes: float64 [n], rounded to whole numbers; with fewer items than parts some are empty.
        equal_size: every part gets n / num_parts items, where n is a multiple of `num_parts`.

    Returns:
        The items of each part, rising; the part with the largest sum first.
    """
    weights = np.round(sizes).astype(np.int64).tolist()
    order = sorted(range(sizes.size), key=lambda item: (weights[item], item))
    each = num_parts if equal_size else 1
    # Negative numbers, so that what is largest is sorted first.
    none: _Set = (0, 0, ())

    def spread(sets: Iterable[_Set]) -> tuple[int, list[_Set]]:
        falling = sorted(sets)
        return falling[0][0] - falling[-1][0], falling

    # Without items the result is the empty tuple, which changes no other.
    heap = [spread([none] * num_parts)]
    for first in range(0, sizes.size, each):
        own = [(-weights[item], -1, (~item,)) for item in order[first : first + each]]
        heap.append(spread([*own, *[none] * (num_parts - each)]))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, one), (_, other) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one, reversed(other), strict=True)
        heapq.heappush(heap, spread((a + b, n + m, i + j) for (a, n, i), (b, m, j) in pairs))
    return [sorted(~item for item in items) for _, _, items in heap[0][1]]


def _missing(rows: Rows, layout: Layout) -> int:
    """Rows up to a multiple of dp * G, of dp if vpp=1. With dp=2, G=3, seven rows lack five."""
    count = layout.next_legal_count(-(-len(rows) // layout.dp), "multiple")
    return layout.dp * count - len(rows)


def _in_turn(rows: Rows, layout: Layout) -> Ranks:
    """Row r to rank r % dp, after padding micro-batches for those that are missing."""
    rows = rows + [[] for _ in range(_missing(rows, layout))]
    return [rows[rank :: layout.dp] for rank in range(layout.dp)]


def _first_fit(items: Iterable[int], size: Sequence[int], rows: Rows, budget: int) -> list[int]:
    """Put each item into the first row with room for it; returns the items that find none."""
    free = [budget - sum(size[i] for i in row) for row in rows]
    left = []
    for i in items:
        at = next((at for at, room in enumerate(free) if room >= size[i]), None)
        if at is None:
            left.append(i)
        else:
            rows[at].append(i)
            free[at] -= size[i]
    return left


def _to_equal_ranks(rows: Rows, sizes: Ints, work: Floats, layout: Layout) -> Ranks:
    """Halve the rows with the most tokens while some are missing; ranks of about equal work."""
    for _ in range(_missing(rows, layout)):
        at = max(range(len(rows)), key=lambda r: (len(rows[r]) > 1, sizes[rows[r]].sum(), r))
        halves: Rows = [[], []]
        for i in sorted(rows[at], key=lambda i: -sizes[i]):
            min(halves, key=lambda half: sizes[half].sum()).append(i)
        rows = [*rows[:at], halves[0], *rows[at + 1 :], halves[1]]
    weight = np.array([work[row].sum() for row in rows])
    return [[rows[r] for r in part] for part in karmarkar_karp(weight, layout.dp, equal_size=True)]


def _packed(plan: Plan, lengths: Ints, pack: Callable[[Ints], Ranks], pad: bool = False) -> Plan:
    """The plan with the samples of each step in the rows that `pack` makes of their sizes."""
    layout = plan.layout
    tokens = lengths.tolist()
    sizes = layout.aligned_sample_tokens(lengths)
    size = sizes.tolist()

    def micro_batch(row: list[int], kept: Sequence[int]) -> MicroBatch:
        # Rows are short: Python's sums take less time than calls of numpy.
        samples = tuple(kept[i] for i in row)
        taken = [size[i] for i in samples]
        if pad:
            taken = [max(taken, default=0)] * len(row)
        row_tokens = layout.aligned_row_tokens(sum(taken))
        return MicroBatch(
            samples=samples,
            row_tokens=row_tokens or layout.row_alignment,
            tokens=sum(tokens[i] for i in samples),
            tokens_sq=sum(n * n for n in taken),
            padded_tokens=row_tokens,
        )

    def packed(step: StepPlan) -> StepPlan:
        kept = step.kept_samples
        ranks = pack(sizes[list(kept)])
        return StepPlan(
            ranks=tuple(tuple(micro_batch(row, kept) for row in rank) for rank in ranks),
            num_microbatches=len(ranks[0]),
            group_size=layout.group_size if layout.vpp > 1 else None,
            kept_rollouts=step.kept_rollouts,
            dropped_rollouts=step.dropped_rollouts,
            # These hosts' models encode images in rows.
            images=tuple(image._replace(owner=None) for image in step.images),
        )

    policy = replace(plan.policy, images="row") if plan.counts.num_images else plan.policy
    return replace(plan, steps=tuple(map(packed, plan.steps)), policy=policy)
