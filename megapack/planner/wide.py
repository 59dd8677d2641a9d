"""The search for rows over several DP ranks, under `context_parallel="dynamic"`.

A long sample alone on one rank is a step's critical path, while the other ranks wait. Cut over the
ranks of a position whose target it then meets, it takes no longer than their other rows. So the
profile of perfectly divisible work, which no plan of whole samples can reach, is nearly reached.

The draft of rows on one rank each is one of the boards that are improved, so no plan is slower than
it in the simulator. If it is near the best profile already, nothing is searched.
"""

from __future__ import annotations

import math
from dataclasses import replace

from megapack.planner.draft import Draft
from megapack.planner.items import Items
from megapack.planner.scored import Way
from megapack.planner.starts import MAX_ROUNDS, counts_to_try, loosened, wide_starts
from megapack.planner.step import UNLIMITED
from megapack.planner.targets import equal_target

# All constants of this module were chosen by hand. docs/maintainers/planner.md says how to judge a
# change.

# A step within this part of the best profile is not searched further: 1.005 s for 1 s.
_NEAR = 0.005
# Simulations of the whole step: at most as many as the policy's evaluations, and at most 1,536
# operations of ranks for each. By default these are 2,048 and 3 * 2**20. On dp8 x pp4 x vpp2 with
# M=32 a rank has 2 * 32 * 8 = 512 operations, a simulation has 4,096, and there are 768 of them.
_OPERATIONS = 1536
# Places that moves try for items, for each simulation; see `Scored.affordable`.
_MOST_PLACES = 4000
# Relative gain that makes a draft better than the fixed one: more than rounding in fp64.
_LEAST_GAIN = 1e-9


def plan_wide(items: Items, fixed: Draft | None) -> Draft | None:
    """The best draft with rows over several ranks; None if it is not faster than `fixed`, or no
    draft respects the policy.

    Args:
        fixed: the best draft of rows on one rank each; None if there is none, because an item is
            over the budget or no such draft respects the cap on live tokens.
    """
    step = items.step
    # 1. The values of M and their targets.
    way = Way(items, num_levels=2)
    own = [] if fixed is None else [fixed.num_microbatches]
    most = step.legal_count(max(items.num_items, *own, 1))
    held = step.capacity * step.layout.dp
    least = step.legal_count(-(-int(items.aligned.sum()) // held))
    wanted = counts_to_try(way, least, UNLIMITED)
    counts = sorted({min(count, most) for count in (*wanted, *own)})
    rounds = MAX_ROUNDS if step.policy.search else 0
    targets = [equal_target(way, count, rounds) for count in counts]
    targets.sort(key=lambda target: target.seconds)
    goal = (1 + _NEAR) * targets[0].seconds
    # 2. The boards: that of the fixed draft, and items filled to the targets.
    way = replace(way, num_levels=len(step.policy.widths(step.layout)))
    found = [] if fixed is None else [loosened(way, fixed)]
    before = min((scored.seconds for scored in found), default=math.inf)
    if before <= goal < math.inf:
        return None
    found += wide_starts(way, targets, before)
    # 3. Moves.
    if not found:
        return None
    best = min(found, key=lambda scored: scored.seconds)
    num_ops = best.num_ops * step.layout.dp
    search = step.policy.search
    budget = min(search, search * _OPERATIONS // num_ops)
    best.improve(best.affordable(budget, _MOST_PLACES), goal)
    if best.seconds == math.inf or best.seconds >= before * (1 - _LEAST_GAIN):
        return None
    draft = best.draft()
    # With prefixes the board's seconds are not those of the step.
    if fixed is not None and draft.seconds() >= fixed.seconds() * (1 - _LEAST_GAIN):
        return None
    return draft
