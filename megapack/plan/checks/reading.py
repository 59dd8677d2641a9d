"""What all checks read: a plan with the lengths that it was made for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from megapack.base.arrays import Ints, read_sets
from megapack.errors import ConfigError, PlanError
from megapack.prefixes import PrefixTable, Spans

if TYPE_CHECKING:
    from megapack.images import Images
    from megapack.plan.plan import MicroBatch, Plan, RolloutId, StepPlan


@dataclass(frozen=True)
class Reading:
    """A plan that is checked, and what several checks derive from it."""

    plan: Plan
    lengths: Ints
    """int64 [samples], real tokens."""
    images: list[Images] | None = None
    """Of each sample; None: not known."""

    @property
    def steps(self) -> Iterator[tuple[str, StepPlan]]:
        """Each step after its name: "step 0"."""
        return ((f"step {number}", step) for number, step in enumerate(self.plan.steps))

    @property
    def rows(self) -> Iterator[tuple[str, StepPlan, int, int, MicroBatch]]:
        """Each micro-batch of each rank, after its name, step, rank and place in the order."""
        for where, step in self.steps:
            for rank, row in enumerate(step.ranks):
                for k, mb in enumerate(row):
                    yield f"{where} rank {rank} micro-batch {k}", step, rank, k, mb

    @cached_property
    def budget(self) -> int | None:
        """Padded tokens that a row may hold per DP rank; None: no budget."""
        try:
            return self.plan.capacity
        except ConfigError as error:
            raise broken(4, str(error)) from None

    @cached_property
    def rollout_of(self) -> Ints:
        """int64 [samples], each one's rollout, counted in order of first appearance."""
        return self._sets[0]

    @cached_property
    def rollouts(self) -> tuple[RolloutId, ...]:
        """Ids of the rollouts, in order of first appearance."""
        ids = self._sets[1]
        return tuple(range(self.lengths.size)) if ids is None else tuple(dict.fromkeys(ids))

    @cached_property
    def rollout_numbers(self) -> dict[RolloutId, int]:
        """Each id's place in `rollouts`."""
        return {rollout: k for k, rollout in enumerate(self.rollouts)}

    @cached_property
    def set_of(self) -> Ints:
        """int64 [samples], each one's colocated set."""
        return self._sets[2]

    @cached_property
    def _sets(self) -> tuple[Ints, tuple[RolloutId, ...] | None, Ints]:
        plan = self.plan
        return read_sets(plan.rollout_ids, plan.colocate_ids, plan.num_samples)[:3]

    @cached_property
    def _table(self) -> PrefixTable | None:
        return self.plan.prefix_table(self.lengths)

    def saved(self, samples: list[int], width: int, spans: Spans) -> tuple[int, int]:
        """Tokens and squared tokens that a row of these samples saves."""
        table = self._table
        if table is None or len(samples) < 2:
            return 0, 0
        return table.over(width).saved_in_row(np.array(samples), spans)


def broken(number: int, what: str) -> PlanError:
    """The error about an invariant, see `plan.check`."""
    return PlanError(f"invariant {number} is broken: {what}")
