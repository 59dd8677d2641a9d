"""Which rollouts train in which optimizer step."""

from __future__ import annotations

import numpy as np

from megapack.errors import ConfigError, PlanError
from megapack.inputs import Ints, check_count
from megapack.jit import kernel
from megapack.policy import StepSplit


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
