"""The pipeline simulator: how long a planned step takes, where it waits, what it keeps in memory.

An operation starts when its stage is free and its input has arrived, `p2p` seconds after the
operation that makes the input ended. Each stage runs the plan's order of operations, or that of
Megatron's schedule. Sends overlap: a stage never waits to send. For M equal micro-batches in
Megatron's order the bubble is (pp - 1) / (vpp * M): 3/16 with pp=4, vpp=2, M=8. DP ranks that share
a micro-batch begin its forwards and backwards together, and all ranks do so in lockstep.

Images that are encoded ahead come before the first operation and after the last one: each GPU
encodes its own, all wait until the features have been exchanged, and so do their gradients, before
the tower's backward. Images in rows are a part of the first chunk's forwards and backwards.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import CostModel, cost_in_tokens
from megapack.errors import ConfigError, PlanError
from megapack.layout import Layout
from megapack.pipeline.images import image_phases, on_first_chunk, row_image_seconds
from megapack.pipeline.kernels import CoupledOps, RankOps, coupled_order_seconds
from megapack.plan.order import KINDS, StepOrder, step_order
from megapack.plan.plan import MicroBatch, Plan, StepPlan

# A mistaken size must not ask for all memory or run for hours. Chosen by hand: 2**12 chunks are far
# beyond any pipeline, and 2**24 forwards with their backwards take 1.25 GiB (5 int64 each).
_MAX_CHUNKS = 2**12
_MAX_FORWARDS = 2**24


EVENT_KINDS = (*KINDS, "E", "T")
"""What `Event.kind` may be."""


@dataclass(frozen=True)
class Event:
    """One operation of one chunk."""

    rank: int
    """DP rank."""
    stage: int
    """Pipeline stage."""
    chunk: int
    """Chunk of the stage, 0 to vpp - 1."""
    microbatch: int
    """Index among the rank's micro-batches; -1 of images ahead of all."""
    kind: Literal["F", "B", "W", "E", "T"]
    """Forward, backward, or weight gradients that the backward left; images encoded ahead by the
    stage's slowest GPU, or the tower's backward."""
    start: float
    """Seconds since the start of the step."""
    end: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step."""

    makespan: float
    """Seconds until the last rank ends its last operation."""
    rank_makespans: tuple[float, ...]
    """Seconds of each DP rank."""
    slowest_rank: int
    """DP rank that ends last; among ranks that end together, the one with the most work."""
    rank_work: tuple[float, ...]
    """Work of each DP rank: seconds of its rows' forwards through one chunk of weight 1."""
    busy_seconds: float
    """Work of the slowest rank's busiest stage."""
    peak_live_tokens: float
    """Peak of the row tokens whose activations one GPU holds at once, per GPU, after CP. A row in
    one chunk counts 1/vpp: the unit is the activations of one token in a whole stage."""
    peak_in_flight: float
    """The same peak in micro-batches."""
    image_seconds: float
    """Seconds before and after the rows, of images that are encoded ahead."""
    _phases: tuple[Event, ...] = field(repr=False)
    _runs: tuple[_RankRun, ...] = field(repr=False)

    @property
    def bubble_fraction(self) -> float:
        """Seconds of the rows over the work of the slowest rank's busiest stage, minus 1."""
        return bubble_fraction(self.makespan - self.image_seconds, self.busy_seconds)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The timeline by rank, then in the order in which the simulator ran it."""
        rows = (event for rank, run in enumerate(self._runs) for event in run.events(rank))
        return (*rows, *self._phases)


@dataclass(frozen=True)
class _RankRun:
    order: StepOrder
    start: Floats
    end: Floats

    def events(self, rank: int) -> list[Event]:
        order = self.order
        kinds: list[Any] = [KINDS[kind] for kind in order.kind.tolist()]
        columns = (order.stage, order.chunk // order.pp, order.microbatch, self.start, self.end)
        rows = zip(kinds, *(column.tolist() for column in columns), strict=True)
        return [Event(rank, stage, chunk, k, kind, *span) for kind, stage, chunk, k, *span in rows]


def simulate(
    step: StepPlan,
    *,
    layout: Layout,
    cost: CostModel | None = None,
    lockstep: bool = False,
    forward_only: bool = False,
) -> Simulation:
    """Simulate a step's timeline, in the plan's order of operations or in Megatron's.

        simulation = simulate(plan.steps[0], layout=plan.layout, cost=cost)
        simulation.makespan, simulation.slowest_rank, simulation.events

    Args:
        step: a step of a plan.
        layout: the plan's layout.
        cost: seconds of micro-batches; None: those of `cost_in_tokens`.
        lockstep: ranks wait for each other at every micro-batch, as with experts spread over DP:
            they begin the k-th one together, and it takes as long on each as on the slowest.
        forward_only: no backwards, and no activations kept.

    Raises:
        ConfigError: stage weights that do not fit the layout, lockstep with unequal M, or
            sizes far beyond any pipeline.
        PlanError: an M that Megatron would not run, a step without ranks, or different orders of
            ranks that wait for each other.
    """
    if not step.ranks:
        raise PlanError(f"a step of 0 ranks for dp={layout.dp}; give one with micro-batches")
    cost = cost or cost_in_tokens(layout)
    runner = Runner(layout, cost, forward_only)
    forward = [_forward_seconds(rank, layout, cost, runner.factors) for rank in step.ranks]
    work = forward
    if runner.factors != (1.0,):
        work = [_forward_seconds(rank, layout, cost, (1.0,)) for rank in step.ranks]
    busiest = [runner.busiest_stage_seconds(seconds) for seconds in forward]
    forward = _slowest(forward) if lockstep else forward
    group = step.group_size
    # A pass without backwards over the rows of a training step runs in Megatron's order.
    is_ordered = bool(step.orders) and not forward_only
    orders = [
        step.order(r, layout) if is_ordered else runner.order(len(rank), group)
        for r, rank in enumerate(step.ranks)
    ]
    weight = [_weight_seconds(rank, layout, cost) for rank in step.ranks]
    columns = zip(orders, forward, _slowest(weight) if lockstep else weight, strict=True)
    seconds = [runner.seconds(*own) for own in columns]
    in_rows = [row_image_seconds(step, rank, cost) for rank in range(len(step.ranks))]
    for rank, images in enumerate(_slowest(in_rows) if lockstep else in_rows):
        seconds[rank] += on_first_chunk(orders[rank], images, cost.tower_ratio)
        if in_rows[rank].any():
            work[rank] = work[rank] + in_rows[rank]
            busiest[rank] = float(np.bincount(orders[rank].stage, seconds[rank]).max())
    if lockstep:
        blocks, firsts = [range(len(step.ranks))], [[0] * len(rank) for rank in step.ranks]
    elif any(mb.dp_ranks for mb in step.microbatches):
        blocks, firsts = step.meeting_ranks(layout), _first_ranks(step)
    else:
        blocks = [range(r, r + 1) for r in range(len(step.ranks))]
        firsts = [[r] * len(rank) for r, rank in enumerate(step.ranks)]
    runs: list[_RankRun] = []
    for block in blocks:
        own = slice(block.start, block.stop)
        first_DM = np.array(firsts[own]) - block.start
        runs += runner.coupled_timelines(orders[own], seconds[own], first_DM, block.start)
    phases = image_phases(step, layout, cost, forward_only=forward_only)
    before, after = phases.before, phases.after
    if before:
        runs = [replace(run, start=run.start + before, end=run.end + before) for run in runs]
    ends = [float(run.end.max()) for run in runs]
    spans = phases.spans(max(ends))
    slowest = max(range(len(ends)), key=lambda r: (ends[r], busiest[r]))
    live = [
        order.peak_live(_rows_per_gpu(rank, layout)).max()
        for order, rank in zip(orders, step.ranks, strict=True)
    ]
    flight = [order.peak_live(np.ones(order.microbatch.max() + 1)).max() for order in orders]
    return Simulation(
        makespan=ends[slowest] + after,
        rank_makespans=tuple(end + after for end in ends),
        slowest_rank=slowest,
        rank_work=tuple(math.fsum(seconds.tolist()) for seconds in work),
        busy_seconds=busiest[slowest],
        peak_live_tokens=float(max(live)) / layout.vpp,
        peak_in_flight=float(max(flight)) / layout.vpp,
        image_seconds=before + after,
        _phases=tuple(Event(r, stage, 0, -1, kind, *span) for r, stage, kind, *span in spans),
        _runs=tuple(runs),
    )


class Runner:
    """Simulates single DP ranks under one layout and cost model."""

    def __init__(self, layout: Layout, cost: CostModel, forward_only: bool = False) -> None:
        if layout.num_chunks > _MAX_CHUNKS:
            raise ConfigError(
                f"pp * vpp = {layout.num_chunks} chunks; set pp * vpp to at most {_MAX_CHUNKS}"
            )
        self.layout = layout
        self.p2p = float(cost.p2p)
        self.forward_only = forward_only
        self.weights = np.array(cost.weights_for(layout))
        # Chunks of the same factor are of one kind.
        self.factors = cost.distinct_factors
        factors = cost.factors_for(layout)
        self.kinds = np.array([self.factors.index(factor) for factor in factors])
        self.backward_ratio = float(cost.backward_ratio)

    def for_shares(self, squares: float) -> Runner:
        """The same for rows whose squares are this part of their seconds: chunks are of one kind.

        With 0.2, a chunk of weight 1 and factor 0 has weight 0.8.
        """
        if len(self.factors) == 1:
            return self
        factors = np.array(self.factors)[self.kinds]
        runner = copy.copy(self)
        runner.weights = self.weights * (1.0 + (factors - 1.0) * squares)
        runner.factors = (1.0,)
        runner.kinds = np.zeros_like(self.kinds)
        return runner

    def order(self, num_microbatches: int, group: int | None = None) -> StepOrder:
        """The operations of a DP rank with this many micro-batches; `group` is G, the layout's by
        default.

        Raises:
            PlanError: an M that Megatron would not run.
            ConfigError: an M too large to simulate.
        """
        layout = self.layout
        group = (group or layout.group_size) if layout.vpp > 1 else 1
        too_small = layout.vpp > 1 and group < layout.pp
        if too_small or not layout.is_legal_count(num_microbatches, group):
            raise PlanError(
                f"M={num_microbatches} with pp={layout.pp}, vpp={layout.vpp}, G={group}; set a "
                "legal count: M >= 1, interleaved M >= G >= pp and M % G 0 or >= pp"
            )
        if num_microbatches * layout.num_chunks > _MAX_FORWARDS:
            raise ConfigError(
                f"M={num_microbatches} of pp * vpp = {layout.num_chunks} chunks; set sizes "
                f"whose product is at most {_MAX_FORWARDS}"
            )
        return step_order(layout.pp, layout.vpp, num_microbatches, group, self.forward_only)

    def ops(self, num_microbatches: int, group: int | None = None) -> RankOps:
        """The same operations with this cost model's factors, for the compiled loops."""
        return self.ops_of(self.order(num_microbatches, group))

    def ops_of(self, order: StepOrder) -> RankOps:
        """An order with this cost model's factors; weight gradients have none of their own."""
        passes = np.array([1.0, self.backward_ratio, 0.0])[order.kind]
        return RankOps(
            order.stage,
            order.microbatch,
            self._columns(order),
            order.held,
            order.waits_for,
            self.weights[order.chunk] * passes,
            self.layout.pp,
            self.p2p,
        ).read_only()

    def _columns(self, order: StepOrder) -> Ints:
        """`RankOps.column`."""
        if len(self.factors) == 1:
            return order.microbatch
        count = order.microbatch.max() + 1
        return np.asarray(self.kinds[order.chunk] * count + order.microbatch, dtype=np.int64)

    def seconds(self, order: StepOrder, forward_seconds: Floats, weight_seconds: Floats) -> Floats:
        """float64 [operations]: seconds of each operation of a DP rank.

        Args:
            forward_seconds: float64 [kinds * M], see `kernels.rank_seconds`.
            weight_seconds: float64 [M], one chunk's weight gradients of each micro-batch.
        """
        forward = forward_seconds[self._columns(order)]
        seconds: Floats = self.ops_of(order).scale * forward
        # Weight gradients are a part of the backward, which is shorter by them where they are
        # apart.
        share = self.weights[order.chunk] * weight_seconds[order.microbatch]
        whole = self.weights[order.chunk] * self.backward_ratio * forward
        share = np.minimum(share, whole)
        seconds += np.where(order.kind == 2, share, 0.0)
        seconds -= np.where((order.kind == 1) & (order.held == 0), share, 0.0)
        return seconds

    def coupled_timelines(
        self, orders: Sequence[StepOrder], seconds: Sequence[Floats], first_DM: Ints, first: int = 0
    ) -> list[_RankRun]:
        """The timeline of each DP rank, where ranks wait for those that share a micro-batch.

        Args:
            seconds: per rank, see `seconds`.
            first_DM: see `kernels.CoupledOps`.
            first: the number of the first rank.

        Raises:
            PlanError: the forwards and backwards of two ranks are in different orders.
        """
        passes = [order.passes for order in orders]
        for rank, own in enumerate(passes):
            if not np.array_equal(own, passes[0]):
                raise PlanError(
                    f"ranks {first} and {first + rank} wait for each other and run their forwards "
                    "and backwards in different orders; give a plan that check_plan accepts"
                )
        ends = np.cumsum([0, *(order.stage.size for order in orders)])
        of_ranks = [(one.stage, one.microbatch, one.kind, one.waits_for) for one in orders]
        stage, microbatch, kind, waits_for = map(np.concatenate, zip(*of_ranks, strict=True))
        ops = CoupledOps(
            stage, microbatch, kind, waits_for, ends, first_DM, self.layout.pp, self.p2p
        )
        flat = np.concatenate(seconds)
        end = np.empty(flat.size)
        coupled_order_seconds(ops, flat, end)
        start = end - flat
        return [
            _RankRun(order, start[begin:stop], end[begin:stop])
            for order, begin, stop in zip(orders, ends[:-1], ends[1:], strict=True)
        ]

    def busiest_stage_seconds(self, forward_seconds: Floats) -> float:
        """Work of the stage that has the most.

        Args:
            forward_seconds: float64 [kinds * M], see `kernels.rank_seconds`.
        """
        passes = 1.0 if self.forward_only else 1.0 + self.backward_ratio
        sums = forward_seconds.reshape(len(self.factors), -1).sum(axis=1)
        # In units of the first kind.
        share = sums / sums[0] if sums[0] > 0 else np.ones_like(sums)
        chunks = self.weights * share[self.kinds]
        per_stage = chunks.reshape(self.layout.vpp, self.layout.pp).sum(axis=0)
        return float(per_stage.max()) * passes * float(sums[0])


def simulate_planned(plan: Plan, step: StepPlan, cost: CostModel | None) -> Simulation:
    """`simulate` with a plan's layout and passes; in lockstep if its experts are spread over DP.

    Args:
        step: a step of the plan, or another packing of its samples.
    """
    layout = plan.layout
    return simulate(
        step, layout=layout, cost=cost, lockstep=layout.ep_spans_dp, forward_only=plan.forward_only
    )


def bubble_fraction(seconds: float, busy_seconds: float) -> float:
    """Seconds over the busiest stage's work, minus 1; clipped at 0, which rounding may undercut."""
    return max(0.0, seconds / busy_seconds - 1) if busy_seconds else 0.0


def _forward_seconds(
    rank: tuple[MicroBatch, ...], layout: Layout, cost: CostModel, factors: tuple[float, ...]
) -> Floats:
    """float64 [kinds * M], see `kernels.rank_seconds`."""
    seconds = [
        cost.forward_seconds(layout, tokens_sq=mb.tokens_sq, square_factor=factor, **_sizes(mb))
        for factor in factors
        for mb in rank
    ]
    return np.array(seconds)


def _weight_seconds(rank: tuple[MicroBatch, ...], layout: Layout, cost: CostModel) -> Floats:
    return np.array([cost.weight_seconds(layout, **_sizes(mb)) for mb in rank])


def _sizes(mb: MicroBatch) -> dict[str, int]:
    """What the seconds of a row follow from, but for its squared tokens."""
    return {"row_tokens": mb.row_tokens, "num_samples": len(mb.samples), "width": mb.width}


def _rows_per_gpu(rank: tuple[MicroBatch, ...], layout: Layout) -> Floats:
    return np.array([mb.row_tokens / (layout.cp * mb.width) for mb in rank])


def _first_ranks(step: StepPlan) -> list[list[int]]:
    """[dp][M]: the first rank of those that share each micro-batch.

    Raises:
        PlanError: ranks with a shared micro-batch have different M, or it is not on all its ranks.
    """
    counts = {len(rank) for rank in step.ranks}
    firsts = [[mb.ranks(number)[0] for mb in rank] for number, rank in enumerate(step.ranks)]
    if len(counts) > 1:
        raise PlanError(f"ranks share micro-batches and have M={sorted(counts)}; plan one M")
    for number, rank in enumerate(step.ranks):
        for k, mb in enumerate(rank):
            # Its first rank looks at the others, and each of them at the first.
            others = mb.dp_ranks if number in mb.dp_ranks[:1] else mb.dp_ranks[:1]
            if any(r >= len(step.ranks) or step.ranks[r][k] != mb for r in others):
                raise PlanError(
                    f"micro-batch {k} of the ranks {mb.dp_ranks} is not on all of them; give a "
                    "plan that check_plan accepts"
                )
    return firsts


def _slowest(forward: list[Floats]) -> list[Floats]:
    counts = [seconds.size for seconds in forward]
    if len(set(counts)) > 1:
        raise ConfigError(f"lockstep=True with M={counts} ; plan one M for all ranks")
    return [np.maximum.reduce(forward)] * len(forward)
