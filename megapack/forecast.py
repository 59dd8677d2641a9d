"""What all steps of a plan take together, on paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megapack.cost import CostModel
from megapack.inputs import Ints, read_budget
from megapack.layout import Layout
from megapack.pipeline import simulate_planned
from megapack.plan import MicroBatch, Plan, StepPlan


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Sums over optimizer steps; seconds are the cost model's."""

    num_steps: int
    num_microbatches: tuple[int, int]
    """The least and the most M of a rank in a step."""
    num_rows: int
    """Micro-batches with samples, of all ranks and steps."""
    num_padding_rows: int
    """Micro-batches without."""
    tokens: int
    """Real tokens."""
    row_tokens: int
    """Tokens of all rows, padding counted."""
    fill: float | None
    """Real tokens over the budget of the rows with samples; None for a count-based plan."""
    imbalance: float
    """Work of each step's busiest rank over the ranks' mean; 1 is even."""
    bubble_fraction: float
    """Seconds over the work of each step's busiest stage, minus 1."""
    seconds: float
    """Simulated, all steps one after the other."""
    equal_work_seconds: float
    """The samples' own work spread evenly over all GPUs: no bubble, padding or fixed cost."""
    peak_live_tokens: float
    """See `Simulation.peak_live_tokens`."""

    @property
    def padding_fraction(self) -> float:
        """Share of the row tokens that are not real."""
        return 1 - self.tokens / self.row_tokens

    @property
    def time_over_equal_work(self) -> float | None:
        """How far from what no plan reaches, 1; None where samples themselves cost nothing."""
        return self.seconds / self.equal_work_seconds if self.equal_work_seconds else None


def forecast(plan: Plan, steps: Sequence[StepPlan], lengths: Ints, cost: CostModel) -> Forecast:
    """Simulate steps under the settings of a plan.

    Args:
        plan: gives layout, budget and passes.
        steps: its own, or others of the same samples.
        lengths: those that were planned, int64 [n].
        cost: seconds of micro-batches.

    Raises:
        ConfigError: stage weights that do not fit the layout.
        ScheduleError: a count that Megatron would not run.
    """
    layout = plan.layout
    runs = [simulate_planned(plan, step, cost) for step in steps]
    rows = [mb for step in steps for rank in step.ranks for mb in rank]
    counts = [len(rank) for step in steps for rank in step.ranks]
    kept = lengths[np.concatenate([np.array(step.kept_samples, dtype=np.int64) for step in steps])]
    work = [[_rank_work(rank, layout, cost) for rank in step.ranks] for step in steps]
    mean_work = math.fsum(math.fsum(ranks) / len(ranks) for ranks in work)
    seconds = math.fsum(run.makespan for run in runs)
    busy = math.fsum(run.makespan / (1 + run.bubble_fraction) for run in runs)
    num_rows = sum(bool(mb.samples) for mb in rows)
    capacity = read_budget(layout, plan.max_tokens_per_gpu, plan.micro_batch_size)
    return Forecast(
        num_steps=len(steps),
        num_microbatches=(min(counts), max(counts)),
        num_rows=num_rows,
        num_padding_rows=len(rows) - num_rows,
        tokens=int(kept.sum()),
        row_tokens=sum(mb.row_tokens for mb in rows),
        fill=None if capacity < 0 else int(kept.sum()) / (num_rows * capacity),
        imbalance=math.fsum(map(max, work)) / mean_work if mean_work else 1.0,
        bubble_fraction=max(0.0, seconds / busy - 1) if busy else 0.0,
        seconds=seconds,
        equal_work_seconds=_equal_work_seconds(kept, layout, cost, plan.forward_only),
        peak_live_tokens=max(run.peak_live_tokens for run in runs),
    )


def _rank_work(rank: Sequence[MicroBatch], layout: Layout, cost: CostModel) -> float:
    return math.fsum(
        cost.forward_seconds(
            layout, row_tokens=mb.row_tokens, tokens_sq=mb.tokens_sq, num_samples=len(mb.samples)
        )
        for mb in rank
    )


def _equal_work_seconds(
    lengths: Ints, layout: Layout, cost: CostModel, forward_only: bool
) -> float:
    chunk = cost.forward_seconds(
        layout,
        row_tokens=int(lengths.sum()),
        tokens_sq=int((lengths * lengths).sum()),
        num_samples=lengths.size,
    )
    passes = 1.0 if forward_only else 1.0 + cost.backward_ratio
    # A stage runs its vpp chunks, and a DP rank its share of the samples.
    return passes * (chunk - cost.fixed) * layout.vpp / layout.dp
