"""A number of micro-batches for each rank, under count_rule="per_rank".

Ranks of a dense model wait for each other only in the gradient reduction, so each may have the M
that makes it fastest.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Ints
from megapack.pipeline.kernels import rank_seconds
from megapack.pipeline.simulator import Runner
from megapack.planner.board import row_seconds
from megapack.planner.counts import halves
from megapack.planner.draft import Draft
from megapack.planner.items import members_by_row
from megapack.planner.scored import Scored


class CountAdjuster:
    """Changes each rank's M by merging and splitting rows, as long as the rank gets faster.

    Args:
        budget: simulations that may be spent.
    """

    def __init__(self, scored: Scored, runner: Runner, budget: int) -> None:
        self.items = scored.draft.items
        self.scored = scored
        self.runner = runner
        self.evaluations_left = budget
        self.group = scored.draft.group_size
        row_of = scored.draft.row_of
        self.members = members_by_row(row_of, int(row_of.max()) + 1)
        self.ranks = [rows.tolist() for rows in scored.draft.rank_rows]

    def run(self) -> Draft:
        for rank in range(len(self.ranks)):
            while self.evaluations_left > 0 and self._improve(rank):
                pass
        # Merging leaves gaps in the row numbers, so the rows are renumbered.
        used = [row for rows in self.ranks for row in rows if row >= 0]
        number = {row: k for k, row in enumerate(used)}
        row_of = np.empty(self.items.num_items, dtype=np.int64)
        for row, k in number.items():
            row_of[self.members[row]] = k
        ranks = tuple(np.array([number.get(row, -1) for row in rows]) for rows in self.ranks)
        return Draft(items=self.items, row_of=row_of, rank_rows=ranks, group_size=self.group)

    def _improve(self, rank: int) -> bool:
        """Change the rank's M by one; returns whether that made it faster."""
        before = self._seconds(self.ranks[rank])
        return self._merge(rank, before) or self._split(rank, before)

    def _merge(self, rank: int, before: float) -> bool:
        """Merge the two neighbours with the fewest tokens into one row; undone if not faster."""
        rows = self.ranks[rank]
        if not self._legal(len(rows) - 1):
            return False
        tokens = [self._tokens(row) for row in rows]
        at = min(range(len(rows) - 1), key=lambda k: (tokens[k] + tokens[k + 1], k))
        a = rows[at]
        b = rows[at + 1]
        over = tokens[at] + tokens[at + 1] > self.items.step.capacity
        if min(a, b) < 0 or over or self.items.step.max_samples is not None:
            return False
        both = np.sort(np.concatenate([self.members[a], self.members[b]]))
        old = self.members[a]
        self.members[a] = both
        shorter = [*rows[: at + 1], *rows[at + 2 :]]
        if self._seconds(shorter) < before:
            self.ranks[rank] = shorter
            return True
        self.members[a] = old
        return False

    def _split(self, rank: int, before: float) -> bool:
        """Split the row with the most seconds into two neighbours; undone if not faster."""
        rows = self.ranks[rank]
        seconds = [self._row_seconds(row) for row in rows]
        at = max(range(len(rows)), key=lambda k: (seconds[k], -k))
        row = rows[at]
        if not self._legal(len(rows) + 1) or row < 0 or self.members[row].size < 2:
            return False
        old = self.members[row]
        self.members[row], leaving = halves(old, self.items.work.tolist())
        self.members.append(leaving)
        longer = [*rows[: at + 1], len(self.members) - 1, *rows[at + 1 :]]
        if self._seconds(longer) < before:
            self.ranks[rank] = longer
            return True
        self.members[row] = old
        self.members.pop()
        return False

    def _legal(self, count: int) -> bool:
        """Whether a rank may have `count` micro-batches."""
        return count >= 1 and self.items.step.layout.is_legal_count(count, self.group)

    def _tokens(self, row: int) -> int:
        """Aligned tokens of a row; 0 for padding."""
        return int(self.items.aligned[self.members[row]].sum()) if row >= 0 else 0

    def _row_seconds(self, row: int, factor: float = 1.0) -> float:
        """Seconds of one chunk's forward of a row.

        Args:
            factor: of the chunk's squares.
        """
        members: Ints = self.members[row] if row >= 0 else np.zeros(0, dtype=np.int64)
        sizes = (self.items.aligned, self.items.aligned_sq, self.items.item_samples)
        tokens, squares, samples = (int(size[members].sum()) for size in sizes)
        cost = self.scored.board.cost
        seconds = float(row_seconds(cost, 0, tokens, squares, samples))
        return seconds + (factor - 1.0) * float(cost.per_token_sq[0]) * squares

    def _seconds(self, rows: list[int]) -> float:
        """Simulated seconds of a rank with these rows."""
        self.evaluations_left -= 1
        ops = self.runner.ops(len(rows), self.group)
        forward = np.array(
            [self._row_seconds(row, factor) for factor in self.runner.factors for row in rows]
        )
        return float(rank_seconds(ops, forward, np.empty(ops.stage.size)))
