"""The search for a step's fastest draft if samples share prefixes.

    items without sharing    -> the loose draft: the one without prefixes, whose rows save by chance
    families cut into parts  -> a draft per cut, with few evaluations; the best cut again, with many

The faster one is the plan. So prefixes never make a plan slower: rows of the loose draft are at
most as long as they were. If the best cut is below what any draft without sharing takes, the loose
draft is not made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from megapack.cost.model import TOKENS
from megapack.errors import PlanError
from megapack.pipeline.simulator import Runner
from megapack.planner.counts import fewest_counts
from megapack.planner.families import Families, part_problems
from megapack.planner.problem import StepDraft, StepProblem
from megapack.planner.scored import drafted_seconds
from megapack.planner.search import plan_rows

# Evaluations of the policy's: of 2,048, each cut gets 128, and the best one 1,024 again. The loose
# draft gets all 2,048, as it would without prefixes; if none is made, the best cut gets them. So 7
# cuts take less than twice the policy's evaluations: 896 + 1,024 + 2,048. Chosen by hand.
_TRIAL_PART = 16
_FINAL_PART = 2
# A draft is below the bound if it is this much faster, so that rounding in fp64 never decides.
_MARGIN = 1e-9


@dataclass(frozen=True)
class _Candidate:
    problem: StepProblem
    draft: StepDraft
    seconds: float


def plan_shared_rows(loose: StepProblem, problem: StepProblem) -> tuple[StepProblem, StepDraft]:
    """The best draft that is found, and the problem that it is a draft of.

    Args:
        loose: the step's items as they are without sharing.
        problem: the same items, colocated sets with the tokens that they share inside.

    Raises:
        PlanError: no draft respects the cap on live tokens.
    """
    assert problem.prefixes is not None
    families = Families.find(problem, problem.prefixes)
    if not families.items.size and not problem.shared.any():
        return loose, plan_rows(loose)
    search = problem.policy.search
    bound = least_seconds(loose) * (1 - _MARGIN)
    best = _best_cut(problem, families)
    if best is None:
        return loose, plan_rows(loose)
    is_faster = best.seconds < bound
    best = _searched_again(best, search if is_faster else search // _FINAL_PART)
    if best.seconds >= bound and _is_allowed(loose):
        other = _candidate(loose)
        if other is not None and other.seconds <= best.seconds:
            best = other
    return best.problem, best.draft


def _best_cut(problem: StepProblem, families: Families) -> _Candidate | None:
    """The fastest of the cuts, each planned with few evaluations; None if no cut has a legal draft.

    A cut is not planned if no draft of its parts can be faster than the best one so far.
    """
    best = None
    for parts in part_problems(problem, families):
        if best is not None and least_seconds(parts) >= best.seconds:
            continue
        candidate = _candidate(_with_search(parts, problem.policy.search // _TRIAL_PART))
        if candidate is not None and (best is None or candidate.seconds < best.seconds):
            best = candidate
    return best


def _searched_again(found: _Candidate, search: int) -> _Candidate:
    """The candidate, or its problem's draft with more evaluations if that is faster."""
    if search <= found.problem.policy.search:
        return found
    again = _candidate(_with_search(found.problem, search))
    return again if again is not None and again.seconds < found.seconds else found


def _candidate(problem: StepProblem) -> _Candidate | None:
    """A problem's best draft; None if no draft respects the cap on live tokens."""
    try:
        draft = plan_rows(problem)
    except PlanError:
        return None
    return _Candidate(problem, draft, drafted_seconds(problem, draft))


def _with_search(problem: StepProblem, search: int) -> StepProblem:
    return replace(problem, policy=replace(problem.policy, search=search))


def _is_allowed(loose: StepProblem) -> bool:
    """Whether the loose draft needs no padding micro-batch, or may have some.

    Colocated sets that share are smaller than the same sets without sharing, so fewer rows may have
    been enough to keep the step's rollouts.
    """
    return loose.policy.unreachable == "pad" or loose.num_items >= fewest_counts(loose)


def least_seconds(problem: StepProblem) -> float:
    """Seconds that no draft can undercut, unless its rows share more than their items do.

    Either the mean of the ranks' work on the busiest stage, with the fewest rows that hold the
    tokens, or the longest item on its way through all chunks and back.
    """
    cost = problem.cost or TOKENS
    layout = problem.layout
    runner = Runner(layout, cost, problem.forward_only)
    share = cost.share_of_rank(layout)
    seconds = share * (
        cost.per_token * problem.aligned.astype(np.float64)
        + cost.per_token_sq * problem.aligned_sq.astype(np.float64)
        + cost.per_sample * problem.item_samples
    )
    num_rows = layout.dp
    if problem.capacity > 0:
        held = int(np.minimum(problem.aligned, problem.capacity).sum())
        num_rows = max(num_rows, -(-held // problem.capacity))
    mean = (cost.fixed * num_rows + math.fsum(seconds.tolist())) / layout.dp
    passes = 1.0 if problem.forward_only else 1.0 + cost.backward_ratio
    longest = (cost.fixed + float(seconds.max())) * float(runner.weights.sum()) * passes
    return max(runner.busiest_stage_seconds(np.array([mean])), longest)
