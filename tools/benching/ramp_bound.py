"""A lower bound on a step's seconds that holds with every freedom of the planner.

With rows over several DP ranks, pieces of samples and weight gradients in the waits, work is almost
divisible and no order of backwards is given. What is left is the way to the stages: a stage has
nothing to do before the forward of its first row, and after it the rows that have arrived. The
first rows may be small, but each row costs its fixed seconds, and a small row gives the next stage
little time in which to wait for a larger one.

For M rows that is a linear program, of a rank with the mean work. Its variables are the seconds of
each row, the end of each row's forward on each stage, and T:

- All stages run the forwards in one order, and each row after the stage before it.
- From a row's arrival at a stage to T, the stage runs all that this row and those after it need:
  forward, backward and weight gradient.
- The rows' seconds without the fixed ones are the mean work of a rank.

The bound is the least T over all legal M from the fewest that the budget allows. It is lower than
the truth, because it ignores that most samples are whole; that a row holds at most the budget; that
tokens of rows over several ranks cost more; that stages hold a limited number of tokens, and the
first ones wait for their last backwards; and all chunks of a stage but its first on the way.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from megapack.base.arrays import Floats
from megapack.cost.model import CostModel
from megapack.layout import Layout

# As much as solvers may be wrong.
_TOLERANCE = 1e-6


def ramp_bound(seconds: Floats, layout: Layout, cost: CostModel, least_count: int) -> float:
    """The least seconds of a step, whatever its plan.

    Args:
        seconds: float64 [n], `lower_bound.sample_seconds`.
        cost: its fixed seconds, weights of stages and backward ratio are used.
        least_count: the fewest micro-batches, as by the token budget.

    Raises:
        ValueError: no fixed seconds, so that any number of rows is free.
    """
    if cost.fixed <= 0:
        raise ValueError("a bound of a cost model with fixed=0; set the seconds of a micro-batch")
    weights = np.array(cost.weights_for(layout)).reshape(layout.vpp, layout.pp)
    # Per second of a row: of its forward through a stage's first chunk, and of all that it runs.
    forward_S = weights[0]
    all_S = weights.sum(axis=0) * (1 + cost.backward_ratio)
    mean = float(seconds.sum()) / layout.dp
    best = math.inf
    count = layout.next_legal_count(max(1, least_count))
    while float(all_S.max()) * (count * cost.fixed + mean) < best:
        best = min(best, _least_seconds(count, forward_S, all_S, cost.fixed, mean))
        count = layout.next_legal_count(count + 1)
    return best * (1 - _TOLERANCE)


def _least_seconds(
    count: int, forward_S: Floats, all_S: Floats, fixed: float, mean: float
) -> float:
    """T of M rows.

    Variables: M rows' seconds with the fixed ones, the ends of their forwards on all stages but the
    last (by row, then stage), and T. Each line of the program says that a sum is at most 0.
    """
    num_ends = forward_S.size - 1
    total = count + count * num_ends + 1

    def end(row: int, stage: int) -> int:
        return count + row * num_ends + stage

    # Per line its variables and their factors.
    lines: list[list[tuple[int, float]]] = []
    for row in range(count):
        for stage in range(forward_S.size):
            arrival = [(end(row, stage - 1), 1.0)] if stage else []
            if stage < num_ends:
                forward = [(row, float(forward_S[stage])), (end(row, stage), -1.0)]
                before = [(end(row - 1, stage), 1.0)] if row else []
                lines += [[*arrival, *forward], [*before, *forward]]
            # From its arrival to T, the stage runs this row and all later ones.
            later = [(k, float(all_S[stage])) for k in range(row, count)]
            lines.append([*arrival, *later, (total - 1, -1.0)])
    line = np.repeat(np.arange(len(lines)), [len(own) for own in lines])
    columns, values = zip(*itertools.chain(*lines), strict=True)
    matrix = coo_matrix((values, (line, columns)), shape=(len(lines), total)).tocsr()
    bounds = np.zeros((total, 2))
    bounds[:, 1] = np.inf
    bounds[:count, 0] = fixed
    objective = np.zeros(total)
    objective[-1] = 1.0
    rows = np.zeros((1, total))
    rows[0, :count] = 1.0
    result = linprog(
        objective,
        A_ub=matrix,
        b_ub=np.zeros(len(lines)),
        A_eq=rows,
        b_eq=[count * fixed + mean],
        bounds=bounds,
        method="highs-ds",
    )
    if result.status != 0:
        raise RuntimeError(f"no bound: {result.message}")
    return float(result.fun)
