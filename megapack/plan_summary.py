"""How far a plan is from what no plan can beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megapack.cost import TOKENS, CostModel
from megapack.errors import PlanError
from megapack.inputs import Ints, read_budget, read_lengths
from megapack.layout import Layout
from megapack.packing import fewest_bins_bound
from megapack.pipeline import simulate_planned
from megapack.plan import MicroBatch, Plan, StepPlan


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step against its lower bounds."""

    num_rows: int
    """Micro-batches with samples, of all ranks."""
    num_padding_rows: int
    num_rows_bound: int
    """Rows that the budget needs whatever the packing: the L2 bound of Martello and Toth."""
    tokens: int
    """Real tokens."""
    row_tokens: int
    """Tokens of all rows, padding counted."""
    imbalance: float
    """Work of the busiest rank over the ranks' mean."""
    imbalance_bound: float
    """What it is at least: the largest sample is indivisible."""
    makespan_seconds: float
    """Simulated; tokens for seconds where the plan is reported without a cost model."""
    makespan_bound_seconds: float
    """All work spread evenly at the fewest micro-batches and without a bubble, or the longest
    sample's own way through the pipeline and back, whichever is longer."""
    bubble_fraction: float
    peak_live_tokens: float
    """See `Simulation.peak_live_tokens`."""

    def __str__(self) -> str:
        return (
            f"rows {self.num_rows} (bound {self.num_rows_bound}, padding {self.num_padding_rows}), "
            f"packed {self.tokens / self.row_tokens:.1%}, "
            f"imbalance {self.imbalance:.3f} (bound {self.imbalance_bound:.3f}), "
            f"makespan {self.makespan_seconds:.4g} (bound {self.makespan_bound_seconds:.4g}), "
            f"bubble {self.bubble_fraction:.1%}"
        )


@dataclass(frozen=True)
class PlanReport:
    """All steps of a plan."""

    steps: tuple[StepReport, ...]

    def __str__(self) -> str:
        return "\n".join(f"step {number}: {step}" for number, step in enumerate(self.steps))


def plan_report(
    plan: Plan, lengths: Sequence[int] | Ints, cost: CostModel | None = None
) -> PlanReport:
    """Compare a plan with its lower bounds.

    Args:
        lengths: those that were planned.
        cost: seconds of micro-batches; None counts row tokens.

    Raises:
        PlanError: another number of lengths than the plan has samples.
    """
    flat = read_lengths(lengths)
    if flat.size != plan.num_samples:
        raise PlanError(f"{flat.size} lengths for a plan of {plan.num_samples} samples")
    aligned = plan.layout.aligned_sample_tokens(flat)
    model = cost or TOKENS
    return PlanReport(
        tuple(_report(plan, step, aligned[list(step.kept_samples)], model) for step in plan.steps)
    )


def _report(plan: Plan, step: StepPlan, aligned: Ints, cost: CostModel) -> StepReport:
    layout = plan.layout
    rows = [mb for rank in step.ranks for mb in rank]
    simulation = simulate_planned(plan, step, cost)
    rank_work = [math.fsum(_seconds(mb, layout, cost) for mb in rank) for rank in step.ranks]
    mean = math.fsum(rank_work) / len(rank_work)
    bound = _rows_bound(plan, aligned)
    largest = _alone(int(aligned.max()), layout, cost)
    return StepReport(
        num_rows=sum(bool(mb.samples) for mb in rows),
        num_padding_rows=sum(not mb.samples for mb in rows),
        num_rows_bound=bound,
        tokens=sum(mb.tokens for mb in rows),
        row_tokens=sum(mb.row_tokens for mb in rows),
        imbalance=max(rank_work) / mean if mean else 1.0,
        imbalance_bound=max(1.0, largest / mean) if mean else 1.0,
        makespan_seconds=simulation.makespan,
        makespan_bound_seconds=_makespan_bound(plan, step, aligned, cost, bound),
        bubble_fraction=simulation.bubble_fraction,
        peak_live_tokens=simulation.peak_live_tokens,
    )


def _seconds(mb: MicroBatch, layout: Layout, cost: CostModel) -> float:
    return cost.forward_seconds(
        layout, row_tokens=mb.row_tokens, tokens_sq=mb.tokens_sq, num_samples=len(mb.samples)
    )


def _alone(length: int, layout: Layout, cost: CostModel) -> float:
    """One chunk's forward of a sample by itself."""
    return cost.forward_seconds(layout, row_tokens=length, tokens_sq=length**2, num_samples=1)


def _rows_bound(plan: Plan, aligned: Ints) -> int:
    if plan.micro_batch_size is not None:
        return -(-aligned.size // plan.micro_batch_size)
    capacity = read_budget(plan.layout, plan.max_tokens_per_gpu, plan.micro_batch_size)
    return fewest_bins_bound(aligned, capacity)


def _makespan_bound(
    plan: Plan, step: StepPlan, aligned: Ints, cost: CostModel, rows_bound: int
) -> float:
    layout = plan.layout
    weights = np.array(cost.weights_for(layout))
    passes = 1.0 if plan.forward_only else 1.0 + cost.backward_ratio
    rows_per_rank = rows_bound / layout.dp
    if plan.policy.count_rule != "per_rank":
        rows_per_rank = layout.next_legal_count(math.ceil(rows_per_rank), "legal", step.group_size)
    work = cost.forward_seconds(
        layout,
        row_tokens=int(aligned.sum()),
        tokens_sq=int((aligned * aligned).sum()),
        num_samples=aligned.size,
    )
    share = cost.fixed * rows_per_rank + (work - cost.fixed) / layout.dp
    busiest = float(weights.reshape(layout.vpp, layout.pp).sum(axis=0).max())
    alone = _alone(int(aligned.max()), layout, cost) * float(weights.sum())
    hops = cost.p2p * (layout.num_chunks - 1) * (1 if plan.forward_only else 2)
    return max(passes * busiest * share, passes * alone + hops)
