"""Which rollouts train in which step, and how many rows a step gets.

Steps first: rollouts are split over the optimizer steps. Then rows: their number must be one that
Megatron's schedule accepts. Splitting a row beats padding (a padding micro-batch computes nothing
of use), and padding beats dropping.
"""

from __future__ import annotations

import heapq
import logging
import math

import numpy as np

from megapack.base.arrays import Floats, Ints, check_count
from megapack.base.jit import kernel
from megapack.errors import ConfigError, PlanError
from megapack.planner.bins import first_fit, first_fit_decreasing
from megapack.planner.problem import StepProblem
from megapack.policy import StepSplit

_LOG = logging.getLogger(__name__)


def fewest_rows(problem: StepProblem) -> tuple[Ints, int]:
    """Rows that respect the budget, as few as first-fit-decreasing finds.

    Count-based problems fill rows of `max_samples` in input order.
    """
    if problem.max_samples is not None:
        return first_fit(problem.num, problem.max_samples)
    return first_fit_decreasing(problem.aligned, problem.capacity)


def least_count(problem: StepProblem, num_rows: int, group: int) -> int:
    """The smallest M with room for `num_rows` over the ranks that the count rule allows."""
    layout = problem.layout
    wanted = -(-num_rows // layout.dp)
    return layout.next_legal_count(wanted, problem.policy.count_rule, group)


def rank_counts(problem: StepProblem, num_rows: int, group: int) -> Ints:
    """Micro-batches of each rank with room for `num_rows`: int64 [dp].

    One M for all; under "per_rank" as many ranks as can do with the legal count below it. With
    dp=4 and 14 rows of 1F1B: 4, 4, 3, 3.
    """
    layout = problem.layout
    most = least_count(problem, num_rows, group)
    counts = np.full(layout.dp, most, dtype=np.int64)
    if problem.policy.count_rule != "per_rank":
        return counts
    below = most - 1
    while below > 0 and not layout.is_legal_count(below, group):
        below -= 1
    if below > 0:
        spare = min(layout.dp, (layout.dp * most - num_rows) // (most - below))
        counts[layout.dp - spare :] = below
    return counts


def reach_group(problem: StepProblem) -> int:
    """G of the finest legal counts that the policy allows."""
    layout = problem.layout
    return layout.pp if problem.policy.group_size == "search" else layout.group_size


def keep_reachable(problem: StepProblem, rollout_ends: Ints) -> int:
    """How many of the step's rollouts can be planned under `unreachable`.

    Args:
        problem: its items stand rollout after rollout.
        rollout_ends: int64 [R], items of the first rollout, the first two, and so on.

    Returns:
        R, unless "drop" leaves trailing rollouts out.

    Raises:
        PlanError: "error", or "drop" where no prefix reaches a legal count.
    """
    policy = problem.policy
    if policy.unreachable == "pad":
        return int(rollout_ends.size)
    wanted = _slots(problem)
    if problem.num_items >= wanted:
        return int(rollout_ends.size)
    if policy.unreachable == "error":
        raise PlanError(
            f"{_reach(problem, wanted)}; set unreachable='pad' or 'drop', another budget, dp or G"
        )
    least_rows = _least_rows(problem)
    for kept in range(rollout_ends.size - 1, 0, -1):
        size = int(rollout_ends[kept - 1])
        if size < int(rank_counts(problem, least_rows[size - 1], reach_group(problem)).sum()):
            continue  # without packing it
        prefix = problem.take(size)
        if prefix.num_items >= _slots(prefix):
            _LOG.warning(
                "step %d: dropped %d trailing rollout(s) (%d kept, %d samples)",
                problem.number,
                rollout_ends.size - kept,
                kept,
                prefix.samples.size,
            )
            return kept
    raise PlanError(
        f"{_reach(problem, wanted)}, and no prefix of its rollouts reaches one "
        f"(align count {_align_count(problem)}); set unreachable='pad' or give more samples"
    )


def _least_rows(problem: StepProblem) -> list[int]:
    """Rows that the first item, the first two, and so on cannot do without."""
    if problem.max_samples is not None:
        return [int(n) for n in -(-np.cumsum(problem.num) // problem.max_samples)]
    capacity = max(problem.capacity, 1)  # 0 where the budget is below the alignment
    by_tokens = -(-np.cumsum(np.minimum(problem.aligned, capacity)) // capacity)
    # No two items over half a row share one.
    by_halves = np.cumsum(2 * problem.aligned > problem.capacity)
    return [int(n) for n in np.maximum(by_tokens, by_halves)]


def _slots(problem: StepProblem) -> int:
    _, num_rows = fewest_rows(problem)
    return int(rank_counts(problem, num_rows, reach_group(problem)).sum())


def _align_count(problem: StepProblem) -> int:
    return problem.layout.dp * least_count(problem, 1, reach_group(problem))


def _reach(problem: StepProblem, wanted: int) -> str:
    layout = problem.layout
    group = f", G={layout.group_size}" if layout.vpp > 1 else ""
    what = f"{problem.num_items} samples"
    if problem.samples.size > problem.num_items:
        what = f"{problem.samples.size} samples, {problem.num_items} sets of them by colocate_ids,"
    return (
        f"step {problem.number}: {what} cannot fill {wanted} micro-batches "
        f"on dp={layout.dp} ranks{group}"
    )


def split_heaviest(row_of: Ints, num_rows: int, wanted: int, work: Floats) -> tuple[Ints, int]:
    """Split the row of most work in two until there are `wanted` rows or only single samples.

    Args:
        work: float64 [n], per sample.

    Returns:
        row_of and the number of rows reached.
    """
    if num_rows >= wanted:
        return row_of, num_rows
    row_of = row_of.copy()
    order = np.argsort(row_of, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(row_of, minlength=num_rows))[:-1])
    weigh = work.tolist()

    def weight(row: int) -> float:
        return -math.fsum(weigh[i] for i in members[row].tolist())

    heap = [(weight(row), row) for row in range(num_rows) if members[row].size > 1]
    heapq.heapify(heap)
    while num_rows < wanted and heap:
        _, row = heapq.heappop(heap)
        members[row], leaving = halves(members[row], weigh)
        members.append(leaving)
        row_of[leaving] = num_rows
        for part in (row, num_rows):
            if members[part].size > 1:
                heapq.heappush(heap, (weight(part), part))
        num_rows += 1
    return row_of, num_rows


def halves(samples: Ints, work: list[float]) -> tuple[Ints, Ints]:
    """Two parts of two or more samples: heaviest first into the lighter one; none is empty."""
    halves: tuple[list[int], list[int]] = ([], [])
    load = [0.0, 0.0]
    for i in sorted(samples.tolist(), key=lambda i: (-work[i], i)):
        side = 0 if not halves[0] or (halves[1] and load[0] <= load[1]) else 1
        halves[side].append(i)
        load[side] += work[i]
    return np.array(halves[0]), np.array(halves[1])


def split_rollouts(
    tokens: Ints,
    *,
    global_batch_size: int | None,
    num_steps: int | None,
    step_split: StepSplit,
) -> list[Ints]:
    """Rollout numbers of each step, ascending within a step.

    `global_batch_size` rollouts per step, the last step taking what is left; or `num_steps` steps
    of about equal tokens; or all in one step. "contiguous" keeps the input order over steps,
    "balanced" fills the lightest step first.

    Args:
        tokens: int64 [R], padded tokens of each rollout.

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
            f"num_steps={num_steps} for {num_rollouts} rollouts, and a step needs one at least; "
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
    step_of = _lightest_first(tokens, np.argsort(-tokens, kind="stable"), num_steps, limit)
    return [np.flatnonzero(step_of == step) for step in range(num_steps)]


def _contiguous(tokens: Ints, num_steps: int) -> list[Ints]:
    """Cut where the running sum is nearest to each step's end, a rollout at least per step."""
    ends = np.cumsum(tokens)
    num_rollouts, total = tokens.size, int(ends[-1])
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


@kernel
def _lightest_first(tokens: Ints, order: Ints, num_steps: int, limit: int) -> Ints:
    """Longest first into the step with the fewest tokens that has room for a rollout."""
    step_of = np.empty(tokens.size, dtype=np.int64)
    load = np.zeros(num_steps, dtype=np.int64)
    count = np.zeros(num_steps, dtype=np.int64)
    for place in range(order.size):
        left = order.size - place
        empty = 0
        for step in range(num_steps):
            if count[step] == 0:
                empty += 1
        best = -1
        for step in range(num_steps):
            # The last rollouts go to steps that have none yet.
            if count[step] >= limit or (left <= empty and count[step] > 0):
                continue
            if best < 0 or load[step] < load[best]:
                best = step
        step_of[order[place]] = best
        load[best] += tokens[order[place]]
        count[best] += 1
    return step_of
