"""Which rollouts train in which step, and how many rows a step gets.

Rollouts are first split over the optimizer steps. Then each step needs a number of rows that
Megatron's schedule accepts. Splitting a row is better than adding a padding micro-batch, which
computes nothing useful, and padding is better than dropping rollouts.
"""

from __future__ import annotations

import heapq
import logging
import math

import numpy as np

from megapack.base.arrays import Floats, Ints, check_count
from megapack.errors import ConfigError, PlanError
from megapack.planner.items import Items, members_by_row
from megapack.policy import StepSplit

logger = logging.getLogger(__name__)


def split_rollouts(
    tokens: Ints, *, global_batch_size: int | None, num_steps: int | None, step_split: StepSplit
) -> list[Ints]:
    """Rollout numbers of each step, ascending within a step.

    Args:
        tokens: int64 [R], padded tokens of each rollout.
        global_batch_size: rollouts per step; the last step gets the rest.
        num_steps: number of steps, of about equal tokens. Without either number there is one step.
        step_split: "contiguous" keeps the input order over steps; "balanced" gives the longest
            rollouts out first, each to the step with the fewest tokens.

    Raises:
        ConfigError: both numbers given, or one not positive.
        PlanError: more steps than rollouts.
    """
    check_count("global_batch_size", global_batch_size)
    check_count("num_steps", num_steps)
    num_rollouts = tokens.size
    if global_batch_size is not None and num_steps is not None:
        raise ConfigError(
            f"both global_batch_size={global_batch_size} and num_steps={num_steps} given; set one"
        )
    if num_steps is not None and num_steps > num_rollouts:
        raise PlanError(
            f"num_steps={num_steps} for {num_rollouts} rollouts, and a step needs at least one; "
            f"set num_steps to at most {num_rollouts}"
        )
    limit = num_rollouts
    if global_batch_size is not None:
        limit = int(global_batch_size)
        num_steps = -(-num_rollouts // limit)
        if step_split == "contiguous":
            return np.split(np.arange(num_rollouts), range(limit, num_rollouts, limit))
    if num_steps is None or num_steps == 1:
        return [np.arange(num_rollouts)]
    if step_split == "contiguous":
        return _contiguous(tokens, num_steps)
    return _lightest_first(tokens, num_steps, limit)


def keep_reachable(items: Items, rollout_ends: Ints) -> tuple[Items, int]:
    """Leave trailing rollouts out if `unreachable` asks for it.

    Args:
        items: sorted by rollout.
        rollout_ends: int64 [R], number of items of the first rollout, of the first two, and so on.

    Returns:
        items: those of the kept rollouts.
        num_kept: number of rollouts kept: R, unless "drop" leaves some out.

    Raises:
        PlanError: a legal count cannot be reached under "error", or by any prefix under "drop".
    """
    num_rollouts = int(rollout_ends.size)
    step = items.step
    policy = step.policy
    if policy.unreachable == "pad":
        return items, num_rollouts
    wanted = fewest_counts(items)
    if items.num_items >= wanted:
        return items, num_rollouts
    if policy.unreachable == "error":
        raise PlanError(
            f"{_unreachable(items, wanted)}; set unreachable='pad' or 'drop', another budget, "
            "dp or G"
        )
    least_rows = _least_rows(items)
    for kept in range(num_rollouts - 1, 0, -1):
        size = int(rollout_ends[kept - 1])
        if size < step.layout.dp * step.least_count(least_rows[size - 1]):
            continue  # Too few items even for a lower bound of the rows: packing is not needed.
        prefix = items.take(np.arange(size))
        if prefix.num_items >= fewest_counts(prefix):
            text = "step %d: dropped %d trailing rollout(s) (%d kept, %d samples)"
            sizes = num_rollouts - kept, kept, prefix.samples.size
            logger.warning(text, step.number, *sizes)
            return prefix, kept
    least = step.layout.dp * step.least_count(1)
    raise PlanError(
        f"{_unreachable(items, wanted)}, and no prefix of its rollouts reaches one "
        f"(align count {least}); set unreachable='pad' or give more samples"
    )


def _least_rows(items: Items) -> list[int]:
    """Lower bounds on the number of rows for the first item, the first two, and so on."""
    step = items.step
    if step.max_samples is not None:
        return [int(n) for n in -(-np.cumsum(items.item_samples) // step.max_samples)]
    capacity = step.capacity
    by_tokens = -(-np.cumsum(np.minimum(items.room, capacity)) // capacity)
    # Two items larger than half a row never share a row.
    by_halves = np.cumsum(2 * items.room > capacity)
    return [int(n) for n in np.maximum(by_tokens, by_halves)]


def fewest_counts(items: Items) -> int:
    """Micro-batches of all ranks at the smallest legal M with room for the fewest rows."""
    _, num_rows = items.fewest_rows
    return items.step.layout.dp * items.step.least_count(num_rows)


def _unreachable(items: Items, wanted: int) -> str:
    """The first part of an error message: which step has too few items for its micro-batches."""
    layout = items.step.layout
    group = f", G={layout.group_size}" if layout.vpp > 1 else ""
    what = f"{items.num_items} samples"
    if items.samples.size > items.num_items:
        what = f"{items.samples.size} samples in {items.num_items} colocated set(s)"
    return (
        f"step {items.step.number}: {what} cannot fill {wanted} micro-batches "
        f"on dp={layout.dp} ranks{group}"
    )


def split_heaviest(row_of: Ints, num_rows: int, wanted: int, work: Floats) -> tuple[Ints, int]:
    """Split the heaviest row in two until there are `wanted` rows or only rows of one item.

    Args:
        row_of: int64 [I], the row of each item.
        work: float64 [I], per item.

    Returns:
        row_of: int64 [I], after the splits.
        num_rows: number of rows reached.
    """
    if num_rows >= wanted:
        return row_of, num_rows
    row_of = row_of.copy()
    members = members_by_row(row_of, num_rows)

    def key(row: int) -> float:
        """heapq pops the smallest, so the heaviest row has the smallest key."""
        return -math.fsum(work[members[row]].tolist())

    heap = [(key(row), row) for row in range(num_rows) if members[row].size > 1]
    heapq.heapify(heap)
    while num_rows < wanted and heap:
        _, row = heapq.heappop(heap)
        members[row], leaving = _halves(members[row], work)
        members.append(leaving)
        row_of[leaving] = num_rows
        for part in (row, num_rows):
            if members[part].size > 1:
                heapq.heappush(heap, (key(part), part))
        num_rows += 1
    return row_of, num_rows


def _halves(items: Ints, work: Floats) -> tuple[Ints, Ints]:
    """Two non-empty parts of two or more items of about equal work.

    Items of work 5, 4, 3, 2 become 5, 2 and 4, 3.
    """
    falling = items[np.argsort(-work[items], kind="stable")]
    is_first = np.isin(np.arange(items.size) % 4, (0, 3))
    return falling[is_first], falling[~is_first]


def _contiguous(tokens: Ints, num_steps: int) -> list[Ints]:
    """Cut where the running sum is nearest to each step's goal; each step keeps a rollout.

    Rollouts of 100, 1, 1, 1, 1, 96, 50, 50 tokens in 3 steps have goals of 100 and 200, so the cuts
    are after the first and the sixth.
    """
    ends = np.cumsum(tokens)
    num_rollouts = tokens.size
    total = int(ends[-1])
    cuts: list[int] = []
    for step in range(1, num_steps):
        goal = total * step // num_steps
        cut = int(np.searchsorted(ends, goal)) + 1
        before = int(ends[cut - 2]) if cut > 1 else 0
        if goal - before < int(ends[cut - 1]) - goal:
            cut -= 1
        least = cuts[-1] + 1 if cuts else 1
        cuts.append(min(max(cut, least), num_rollouts - (num_steps - step)))
    return np.split(np.arange(num_rollouts), cuts)


def _lightest_first(tokens: Ints, num_steps: int, limit: int) -> list[Ints]:
    """The rollouts of each step: longest first, into the step with the fewest tokens that has room.

    Args:
        limit: rollouts that a step has room for.
    """
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    # A min-heap of steps by tokens, then by number; empty ones come first.
    open_steps = [(0, step) for step in range(num_steps)]
    for rollout in np.argsort(-tokens, kind="stable").tolist():
        load, step = heapq.heappop(open_steps)
        steps[step].append(rollout)
        if len(steps[step]) < limit:
            heapq.heappush(open_steps, (load + int(tokens[rollout]), step))
    return [np.array(sorted(own)) for own in steps]
