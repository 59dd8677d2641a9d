"""All numbers about a plan: counts, simulated seconds, and what the samples' own work takes.

    Plan -> counts, + cost -> simulated seconds, + lengths -> equal work: a StepReport per step,
    and their sums in a PlanReport

Every table, metric and page gets its numbers here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from megapack.base.arrays import Floats, Ints, read_lengths
from megapack.cost.memory import Carried, ImageLoad
from megapack.cost.model import CostModel, cost_in_tokens
from megapack.errors import PlanError
from megapack.pipeline.simulator import Simulation, bubble_fraction, simulate_planned
from megapack.plan.facts import Counts, feature_numbers, features_of
from megapack.plan.microbatch import MicroBatch
from megapack.plan.order import StepOrder
from megapack.plan.plan import Plan, StepPlan, count_steps


@dataclass(frozen=True, kw_only=True)
class Report(Counts):
    """Numbers of optimizer steps that run one after the other.

    Seconds follow the cost model; without one, their unit is the forward of one token.
    """

    num_gpus: int
    fill: float | None
    """Real tokens of the rows within the budget, over their budget on all their DP ranks. None for
    a count-based plan, or if no row is within it."""
    num_rows_over: int
    """Rows over the budget: a sample that is longer has one alone."""
    imbalance: float
    """Work of the busiest DP rank over the mean of the ranks; 1 is even. Work is what a rank's rows
    cost, without the waiting in the pipeline. For several steps, the sums of both are divided."""
    bubble_fraction: float
    """Seconds over the work of the slowest rank's busiest stage, minus 1."""
    seconds: float
    """Simulated seconds of forward and backward."""
    image_seconds: float
    """The part of `seconds` before and after the rows, of images that are encoded ahead."""
    equal_work_seconds: float | None
    """The samples' own work spread evenly over all GPUs: no bubble, padding or fixed cost. What
    samples of a step share is counted once. None without the samples' lengths."""
    peak_live_tokens: float
    """The most row tokens per GPU whose activations a stage holds at once, of any step. See
    `Simulation.peak_live_tokens`."""
    peak_in_flight: float
    """The same peak in micro-batches."""

    @property
    def time_over_equal_work(self) -> float | None:
        """`seconds` over `equal_work_seconds`, at least 1. None without lengths, or if the samples
        themselves cost nothing."""
        return self.seconds / self.equal_work_seconds if self.equal_work_seconds else None

    @property
    def tokens_per_gpu_second(self) -> float:
        """Real tokens of the samples per second and GPU; shared ones count for each sample."""
        return self.tokens / self.seconds / self.num_gpus

    def totals(self) -> dict[str, Any]:
        """The numbers by name, without those of single steps or ranks."""
        values = {field.name: getattr(self, field.name) for field in fields(Report)}
        return values | feature_numbers(self) | {"time_over_equal_work": self.time_over_equal_work}

    def lines(self) -> list[str]:
        """A line for each feature that the steps have, and one for what their orders hold."""
        lines = [feature.line(self) for feature in features_of(self)]
        if self.num_rows_over:
            lines.append(
                f"over the budget: {self.num_rows_over} of {self.num_rows} rows, left out of fill"
            )
        if self.image_seconds:
            lines.append(f"images before and after rows: {self.image_seconds / self.seconds:.1%}")
        if self.num_ordered_steps:
            lines.append(f"live tokens: at most {self.peak_live_tokens:.0f} on a GPU")
        return lines


@dataclass(frozen=True, kw_only=True)
class StepReport(Report):
    """Numbers of one optimizer step."""

    rank_seconds: tuple[float, ...]
    """Simulated seconds of each DP rank."""
    slowest_rank: int
    """See `Simulation.slowest_rank`."""


@dataclass(frozen=True, kw_only=True)
class PlanReport(Report):
    """Numbers of all steps of a plan, and of each. Without a cost model, a unit is the forward of a
    token."""

    steps: tuple[StepReport, ...]


def plan_report(
    plan: Plan, lengths: Sequence[int] | Ints | None = None, cost: CostModel | None = None
) -> PlanReport:
    """Count and simulate a plan: how full its rows are, and how long its steps take.

        report = plan_report(plan, batch.lengths)
        report.time_over_equal_work  # 1.0: a perfect split of the work over all GPUs

    Args:
        plan: any plan.
        lengths: real tokens of each sample, as they were planned; None leaves
            `equal_work_seconds` out.
        cost: seconds of micro-batches; None: those of `cost_in_tokens`.

    Raises:
        PlanError: the number of lengths is not the plan's number of samples, or Megatron would not
            run an M.
        ConfigError: stage weights that do not fit the layout.
    """
    flat = None if lengths is None else read_lengths(lengths)
    if flat is not None and flat.size != plan.num_samples:
        raise PlanError(f"{flat.size} lengths for a plan of {plan.num_samples} samples")
    parts = [_simulate(plan, step, cost, flat) for step in plan.steps]
    steps = tuple(_step_report(plan, part) for part in parts)
    return PlanReport(**_sums(plan, parts), steps=steps)


def step_report(plan: Plan, step: StepPlan, cost: CostModel | None = None) -> StepReport:
    """The numbers of one step under a plan's settings; as `plan_report`, without lengths."""
    return _step_report(plan, _simulate(plan, step, cost, None))


def full_rows(plan: Plan, row_tokens: int) -> dict[str, Any]:
    """What a GPU holds while all rows in flight are as long as this, for `MemoryModel.stage`.

    What rows over several ranks gather, and what pieces and split backwards carry, is as in this
    plan.
    """
    layout = plan.layout
    live = row_tokens * layout.chunks_in_flight() / layout.vpp
    return {
        "live_tokens": max([live, *(plan.live_cap(step) for step in plan.steps if step.orders)]),
        "row_tokens": row_tokens,
        "gathered_tokens": gathered_tokens(plan),
        "carried": carried(plan),
        "wide_sizes": len(plan.counts.wide_rows),
        "images": image_load(plan),
    }


def image_load(plan: Plan) -> ImageLoad:
    """The most patches that a GPU encodes ahead of a step, the most image tokens of the different
    images that a DP rank's rows read, and the largest image."""
    tokens = (
        sum(step.images[n].tokens for n in own) for step in plan.steps for own in step.rank_images
    )
    largest = max((image.patches for step in plan.steps for image in step.images), default=0)
    return ImageLoad(plan.counts.most_patches, max(tokens, default=0), largest)


def gathered_tokens(plan: Plan) -> float:
    """Peak of the tokens of other DP ranks whose keys and values attention gathers on one GPU.

    A row of 8,000 tokens over 4 ranks has 2,000 on a GPU and gathers 6,000. The peak is over the
    rows that a stage holds between forward and backward, where a chunk counts 1/vpp; 0 if no row
    lies over several ranks.
    """
    layout = plan.layout
    peaks = [0.0]
    for step in plan.steps:
        for number, rank in enumerate(step.ranks if step.counts.wide_rows else ()):
            others = np.array([mb.row_tokens * (mb.width - 1) / mb.width for mb in rank])
            order = step.order(number, layout, forward_only=plan.forward_only)
            peaks.append(float(order.peak_live(others).max()) / layout.vpp)
    return max(peaks)


def carried(plan: Plan) -> Carried:
    """What the plan's orders hold beside activations; zeros without pieces and split backwards.

    A sample of 3,000 tokens in three equal pieces keeps the keys and values of 2,000 tokens once
    all of its forwards have run, and its second and third piece read 1,000 and 2,000 earlier ones.
    It keeps two states.
    """
    peaks = np.zeros(4)
    layout = plan.layout
    for step in plan.steps:
        has_pieces = step.counts.num_pieces > 0
        for number, rank in enumerate(step.ranks if has_pieces or step.orders else ()):
            order = step.order(number, layout, forward_only=plan.forward_only)
            chains = step.chains(number)
            kept = [0.0] * len(rank)
            continued = [0.0] * len(rank)
            for first, after in (pair for chain in chains for pair in pairwise(chain)):
                # Pieces that continue in the next row share all of their positions; the second
                # pieces of a family do not continue.
                width = rank[first].width
                continued[first] = 1 / width
                part = rank[first].pieces[0]
                if part.end == rank[after].pieces[0].begin:
                    kept[first] = part.tokens / width
            earlier = [sum(part.begin for part in mb.pieces) / mb.width for mb in rank]
            rows = [mb.row_tokens / mb.width for mb in rank]
            if plan.forward_only:
                # Keys are freed at the end of their chain.
                most = max((sum(kept[k] for k in chain) for chain in chains), default=0)
                # A state goes with the next piece.
                found = (float(most), float(max(earlier)), 0.0, float(max(continued)))
            else:
                found = (
                    _peak(order, np.array(kept), (0, 1)),
                    _peak(order, np.array(earlier), (0, 1)),
                    _peak(order, np.array(rows), (1, 2)),
                    _peak(order, np.array(continued), (0, 1)),
                )
            peaks = np.maximum(peaks, found)
    # Context parallelism splits tokens, and of states the heads, as rows over several ranks do.
    return Carried(*(peaks / (layout.cp * layout.vpp)).tolist())


def _peak(order: StepOrder, amounts: Floats, kinds: tuple[int, int]) -> float:
    """Peak of what a stage holds from each operation of one kind to that of another.

    Args:
        amounts: float64 [M], what each micro-batch holds.
        kinds: indices in `KINDS`; a micro-batch without an operation of the second kind is not
            held.
    """
    begin, end = kinds
    ends = order.kind == end
    key = order.chunk * amounts.size + order.microbatch
    begins = (order.kind == begin) & np.isin(key, key[ends])
    held = (begins.astype(float) - ends) * amounts[order.microbatch]
    stages = range(order.pp)
    return max(float(np.cumsum(held[order.stage == stage]).max()) for stage in stages)


def full_row(plan: Plan, steps: Sequence[StepPlan]) -> tuple[int, str]:
    """Tokens of a full row of one DP rank, and their name.

    They are the budget, or the longest row if there is no budget.
    """
    if plan.capacity is not None:
        return plan.capacity, "the budget"
    longest = max((mb.row_tokens for step in steps for mb in step.microbatches), default=1)
    return longest, "the longest row"


def row_fill(mb: MicroBatch, full: int) -> float:
    """Real tokens that a row holds over those of a full row on all of its DP ranks.

    Args:
        full: see `full_row`.
    """
    return mb.held_tokens / (full * mb.width)


@dataclass(frozen=True)
class _SimulatedStep:
    """A step with its simulation."""

    step: StepPlan
    run: Simulation
    equal_work_seconds: float | None


def _simulate(
    plan: Plan, step: StepPlan, cost: CostModel | None, lengths: Ints | None
) -> _SimulatedStep:
    cost = cost or cost_in_tokens(plan.layout)
    run = simulate_planned(plan, step, cost)
    equal = None if lengths is None else _equal_work_seconds(plan, step, lengths, cost)
    return _SimulatedStep(step, run, equal)


def _step_report(plan: Plan, part: _SimulatedStep) -> StepReport:
    run = part.run
    return StepReport(
        **_sums(plan, [part]), rank_seconds=run.rank_makespans, slowest_rank=run.slowest_rank
    )


def _sums(plan: Plan, parts: Sequence[_SimulatedStep]) -> dict[str, Any]:
    """The fields of `Report` for some steps together."""
    counts = count_steps([part.step for part in parts])
    runs = [part.run for part in parts]
    busiest = math.fsum(max(run.rank_work) for run in runs)
    mean_work = math.fsum(math.fsum(run.rank_work) / len(run.rank_work) for run in runs)
    seconds = math.fsum(run.makespan for run in runs)
    rows = math.fsum(run.makespan - run.image_seconds for run in runs)
    known = [part.equal_work_seconds for part in parts if part.equal_work_seconds is not None]
    return {
        **vars(counts),
        "num_gpus": plan.layout.world_size,
        **_fill(plan, [mb for part in parts for mb in part.step.microbatches if mb.samples]),
        "imbalance": busiest / mean_work if mean_work else 1.0,
        "bubble_fraction": bubble_fraction(rows, math.fsum(run.busy_seconds for run in runs)),
        "seconds": seconds,
        "peak_live_tokens": max((run.peak_live_tokens for run in runs), default=0.0),
        "image_seconds": math.fsum(run.image_seconds for run in runs),
        "peak_in_flight": max((run.peak_in_flight for run in runs), default=0.0),
        "equal_work_seconds": math.fsum(known) if known else None,
    }


def _fill(plan: Plan, rows: Sequence[MicroBatch]) -> dict[str, Any]:
    """The fields of `Report` about rows and the budget."""
    budget = plan.capacity
    if budget is None:
        return {"fill": None, "num_rows_over": 0}
    within = [mb for mb in rows if mb.padded_tokens <= budget * mb.width]
    held, ranks = sum(mb.held_tokens for mb in within), sum(mb.width for mb in within)
    fill = held / (budget * ranks) if within else None
    return {"fill": fill, "num_rows_over": len(rows) - len(within)}


def _equal_work_seconds(plan: Plan, step: StepPlan, lengths: Ints, cost: CostModel) -> float:
    """See `Report`."""
    layout = plan.layout
    samples = np.array(step.kept_samples, dtype=np.int64)
    kept = lengths[samples]
    # What one row with all of the step's samples saves: no plan saves more.
    table = plan.prefix_table(lengths)
    saved = (0, 0) if table is None else table.saved_in_row(samples)
    work = cost.forward_seconds(
        layout,
        row_tokens=int(kept.sum()) - saved[0],
        tokens_sq=int((kept * kept).sum()) - saved[1],
        num_samples=kept.size,
    )
    passes = 1.0 if plan.forward_only else 1.0 + cost.backward_ratio
    # A stage runs its vpp chunks, and a DP rank its share of the samples; every GPU encodes.
    images = cost.image_seconds([image.patches for image in step.images]).sum()
    images *= (1.0 if plan.forward_only else 1.0 + cost.tower_ratio) / layout.world_size
    return float(passes * (work - cost.fixed) * layout.vpp / layout.dp + images)
