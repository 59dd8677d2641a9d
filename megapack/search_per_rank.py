"""Counts of their own for each rank: rows merged and split where that makes a rank faster.

Only the gradient reduction brings ranks of a dense model together, so each may run the number of
micro-batches that suits its samples.
"""

from __future__ import annotations

import numpy as np

from megapack.inputs import Ints
from megapack.pipeline import Runner
from megapack.pipeline_kernels import rank_seconds
from megapack.search_counts import halves
from megapack.search_problem import StepDraft, StepProblem
from megapack.search_scoring import row_seconds
from megapack.search_state import Scored


def adjust_counts(problem: StepProblem, scored: Scored, runner: Runner, budget: int) -> StepDraft:
    """Change ranks' counts while it pays and evaluations are left.

    Args:
        budget: simulations that may be spent.
    """
    return _Adjuster(problem, scored, runner, budget).run()


class _Adjuster:
    def __init__(self, problem: StepProblem, scored: Scored, runner: Runner, budget: int) -> None:
        self.problem, self.runner, self.left, self.scored = problem, runner, budget, scored
        self.group = scored.draft.group_size
        row_of = scored.draft.row_of
        order = np.argsort(row_of, kind="stable")
        self.members = np.split(order, np.cumsum(np.bincount(row_of))[:-1])
        self.ranks = [rows.tolist() for rows in scored.draft.rank_rows]

    def run(self) -> StepDraft:
        for rank in range(len(self.ranks)):
            while self.left > 0 and self._improve(rank):
                pass
        # Rows that were merged away leave gaps; number the others again.
        used = [row for rows in self.ranks for row in rows if row >= 0]
        number = {row: k for k, row in enumerate(used)}
        row_of = np.empty(self.problem.num_items, dtype=np.int64)
        for row, k in number.items():
            row_of[self.members[row]] = k
        ranks = tuple(np.array([number.get(row, -1) for row in rows]) for rows in self.ranks)
        return StepDraft(row_of=row_of, rank_rows=ranks, group_size=self.group)

    def _improve(self, rank: int) -> bool:
        before = self._seconds(self.ranks[rank])
        return self._merge(rank, before) or self._split(rank, before)

    def _merge(self, rank: int, before: float) -> bool:
        """Put the two shortest neighbours into one row."""
        rows = self.ranks[rank]
        if not self._legal(len(rows) - 1):
            return False
        tokens = [self._tokens(row) for row in rows]
        at = min(range(len(rows) - 1), key=lambda k: (tokens[k] + tokens[k + 1], k))
        a, b = rows[at], rows[at + 1]
        capacity = self.problem.capacity
        if min(a, b) < 0 or capacity < 0 or tokens[at] + tokens[at + 1] > capacity:
            return False
        both = np.sort(np.concatenate([self.members[a], self.members[b]]))
        old, self.members[a] = self.members[a], both
        shorter = [*rows[: at + 1], *rows[at + 2 :]]
        if self._seconds(shorter) < before:
            self.ranks[rank] = shorter
            return True
        self.members[a] = old
        return False

    def _split(self, rank: int, before: float) -> bool:
        """Cut the row of most seconds in two, the halves beside each other."""
        rows = self.ranks[rank]
        seconds = [self._row_seconds(row) for row in rows]
        at = max(range(len(rows)), key=lambda k: (seconds[k], -k))
        row = rows[at]
        if not self._legal(len(rows) + 1) or row < 0 or self.members[row].size < 2:
            return False
        old = self.members[row]
        self.members[row], leaving = halves(old, self.problem.work.tolist())
        self.members.append(leaving)
        longer = [*rows[: at + 1], len(self.members) - 1, *rows[at + 1 :]]
        if self._seconds(longer) < before:
            self.ranks[rank] = longer
            return True
        self.members[row] = old
        self.members.pop()
        return False

    def _legal(self, count: int) -> bool:
        return count >= 1 and self.problem.layout.is_legal_count(count, self.group)

    def _tokens(self, row: int) -> int:
        return int(self.problem.aligned[self.members[row]].sum()) if row >= 0 else 0

    def _row_seconds(self, row: int) -> float:
        items: Ints = self.members[row] if row >= 0 else np.zeros(0, dtype=np.int64)
        problem = self.problem
        parts = (problem.aligned, problem.aligned_sq, problem.num)
        return float(row_seconds(self.scored.cost, *(int(part[items].sum()) for part in parts)))

    def _seconds(self, rows: list[int]) -> float:
        self.left -= 1
        ops = self.runner.ops(len(rows), self.group)
        forward = np.array([self._row_seconds(row) for row in rows])
        return float(rank_seconds(ops, forward, np.empty(ops.stage.size)))
