"""Layouts, budgets and rules for a number of GPUs, ranked by predicted speed.

    layouts of the GPUs -> budgets -> plans under each rule -> simulated, those that fit ranked

Layouts come in the order of their bounds, until a bound is below the fastest plans. Of setups that
differ in experts and recomputation only, a budget has the first that fits (`Space.setups`).

The prediction covers the pipeline's bubbles, imbalance and padding, and what the cost model has.
It leaves out the communication of EP and DP: compare layouts of similar ep and dp, and measure the
best few.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megapack.base.arrays import Ids, Ints
from megapack.base.choices import Executor
from megapack.cost.memory import GpuMemory, MemoryModel
from megapack.cost.model import CostModel
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import ConfigError, PlanError
from megapack.images import Images
from megapack.layout import Layout
from megapack.outlook.stats import PlanReport, full_rows, plan_report
from megapack.outlook.tune_space import Kind, Setup, Space
from megapack.plan.plan import Plan, StepPlan
from megapack.policy import Policy, check_policy
from megapack.prefixes import SharedPrefixes

# Chosen by hand: by default the longest sample times 1, 2, 4, 8 and 16 is tried as budget.
_MAX_BUDGETS = 5
# With dynamic context parallelism it is the longest sample over 4, 2 and 1 DP ranks; and where
# samples may be split, a quarter, a half and all of it.
_MAX_SHARERS = 4


@dataclass(frozen=True)
class Trial:
    """A plan to make."""

    setup: Setup
    kind: Kind
    """What the plan may do."""
    max_tokens_per_gpu: int
    policy: Policy

    @property
    def layout(self) -> Layout:
        """Of the setup."""
        return self.setup.layout


@dataclass(frozen=True)
class Candidate(Trial):
    """One layout, budget and policy, planned and simulated."""

    report: PlanReport
    memory: GpuMemory
    """Memory of the fullest stage when every row in flight is full, as in a later batch."""

    @property
    def tokens_per_gpu_second(self) -> float:
        """Real tokens per second and GPU; candidates are ranked by it."""
        return self.report.tokens_per_gpu_second


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Result of a sweep."""

    ranked: tuple[Candidate, ...]
    """Candidates that fit into memory, the fastest first."""
    num_layouts: int
    """Layouts, each with every split of its layers."""
    num_plans: int
    """Plans that were made and differ."""
    num_passed_over: int
    """Layouts whose busiest stage alone is slower than the last of the fastest."""
    least_memory: GpuMemory | None
    """Memory of what needs the least; None if any fits."""
    refusal: str | None
    """What keeps the last budget and policy that have no legal plan from one; None if all have."""
    own: Candidate | PlanError | None
    """The plan of `Workload.own`, whether or not it fits, or why it is not legal."""

    @property
    def best_of_layouts(self) -> tuple[Candidate, ...]:
        """The fastest candidate of each kind and layout, whatever its ep and etp."""
        return _best_of_layouts(self.ranked)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What to plan for: samples, memory and costs, the same for all candidates."""

    lengths: Ints
    """int64 [n]."""
    rollout_ids: Ids | None
    colocate_ids: Ids | None
    global_batch_size: int | None
    num_steps: int | None
    policy: Policy
    """All settings but the fields of `Kind`, which `Space` has."""
    memory: MemoryModel
    memory_bytes: int
    """Memory that one GPU may use."""
    cost_of: Callable[[Setup], CostModel]
    own: Trial | None = None
    """What is run today, to be planned and ranked in any case."""
    prefixes: SharedPrefixes | None = None
    """Tokens that samples have in common; None: nothing is shared."""
    images: Sequence[Images] | None = None
    """Of each sample; None: no sample has one."""
    adapter_ids: Ids | None = None

    def memory_of(self, setup: Setup) -> MemoryModel:
        """`memory` with a setup's recomputation and layers."""
        sizes = replace(self.memory.sizes, recompute=setup.recompute)
        return replace(self.memory, sizes=sizes, stage_layers=setup.stage_layers)

    def policy_of(self, setup: Setup, **changes: Any) -> Policy:
        """`policy` with these changes, within the model's limits."""
        memory, policy = self.memory_of(setup), replace(self.policy, **changes)
        layout = setup.layout
        return policy.within(memory.sizes.max_width(layout), memory.least_piece(layout))


def tune(
    work: Workload,
    space: Space,
    *,
    num_best: int | None = None,
    watch: Callable[[int, int], object] = lambda num_tried, num_layouts: None,
) -> Tuning:
    """Plan and simulate every candidate of a space.

    Args:
        num_best: so many of the fastest are asked for: layouts that are slower at best are not
            planned; None: everything is planned.
        watch: called after each plan with the number of layouts tried so far, and of all.

    Raises:
        ConfigError: no layout fills the GPUs and divides the model, or nothing that `Kind` has is
            tried on any of them.
    """
    sizes = work.memory.sizes
    layouts = list(space.setups(sizes, work.lengths))
    if not layouts:
        tried = {name: getattr(space, name) for name in ("tp", "cp", "ep", "etp", "pp", "vpp")}
        given = ", ".join(f"{name} {list(sizes)}" for name, sizes in tried.items() if sizes)
        raise ConfigError(
            f"no layout of {given or 'any size'} fills {space.num_gpus} GPUs and divides "
            f"{sizes.num_layers} layers, {sizes.num_attention_heads} heads and "
            f"{sizes.num_experts or 'no'} experts; set other sizes"
        )
    kinds = [
        (setups, found)
        for setups in layouts
        if (found := list(_kinds(work, space, setups[0].layout)))
    ]
    if not kinds:
        raise ConfigError(
            f"context_parallel {list(space.context_parallel)}, split_samples "
            f"{list(space.split_samples)} and backward {list(space.backward)} are tried on none of "
            f"{len(layouts)} layouts: rows over several ranks need dp > 1, pieces and split "
            "backwards pp > 1; add fixed, off and joint, or other sizes"
        )
    sweep = _Sweep(work, space, kinds, watch)
    own = None if work.own is None else sweep.own(work.own)
    sweep.run(num_best)
    return Tuning(
        ranked=tuple(sweep.ranked),
        num_layouts=len(layouts),
        num_plans=len(sweep.seen),
        num_passed_over=len(kinds) - len(sweep.tried),
        least_memory=None if sweep.ranked else sweep.least_memory(),
        refusal=sweep.refusal,
        own=own,
    )


@dataclass
class _Sweep:
    work: Workload
    space: Space
    kinds: list[tuple[list[Setup], list[Kind]]]
    watch: Callable[[int, int], object]
    ranked: list[Candidate] = field(default_factory=list)
    tried: dict[int, list[Trial]] = field(default_factory=dict)
    """The trials of the layouts that were reached, by their numbers."""
    refusal: str | None = None
    too_large: list[GpuMemory] = field(default_factory=list)
    """Of plans that do not fit."""
    seen: set[tuple[Setup, tuple[StepPlan, ...]]] = field(default_factory=set)

    def own(self, trial: Trial) -> Candidate | PlanError:
        """Plan a trial before the others, and rank it if it fits."""
        made = self._made(trial)
        self._note(trial, made)
        return made if isinstance(made, PlanError) else made[1]

    def run(self, num_best: int | None) -> None:
        """Make the plans, which `ranked` then has."""
        bounds = {
            (number, recompute): _bound(self.work, setups[0]._replace(recompute=recompute))
            for number, (setups, _) in enumerate(self.kinds)
            for recompute in self.space.recompute
        }
        for number, recompute in sorted(bounds, key=lambda key: -bounds[key]):
            best = _best_of_layouts(self.ranked)[:num_best]
            bound = bounds[number, recompute]
            if len(best) == num_best and bound < best[-1].tokens_per_gpu_second:
                break
            if number not in self.tried:
                self.tried[number] = list(_trials(self.work, self.space, *self.kinds[number]))
            self._plan([one for one in self.tried[number] if one.setup.recompute == recompute])

    def least_memory(self) -> GpuMemory:
        """Of the plan that needs the least; if none was made, of a layout at its smallest
        budget, without images."""
        if self.too_large:
            return min(self.too_large, key=lambda memory: memory.total)
        needs = (
            _memory(self.work, Trial(setup, kind, min(budgets), self.work.policy))
            for setups, kinds in self.kinds
            for setup in setups
            for kind in kinds
            if (budgets := list(_budgets(self.work, self.space, setup.layout, kind)))
        )
        return min(needs, key=lambda memory: memory.total)

    def _plan(self, trials: Sequence[Trial]) -> None:
        """Plan the trials on all cores, and rank those that fit and differ from earlier ones."""
        # Kernels run without Python's lock.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            try:
                for trial, made in zip(trials, pool.map(self._made, trials), strict=True):
                    self._note(trial, made)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _made(self, trial: Trial) -> tuple[Plan, Candidate] | PlanError:
        """The trial's plan, simulated, or why it is not legal."""
        try:
            plan = _plan(self.work, trial)
        except PlanError as error:
            return error
        cost = self.work.cost_of(trial.setup)
        report = plan_report(plan, self.work.lengths, cost)
        memory = _memory(self.work, trial, plan)
        return plan, Candidate(**vars(trial), report=report, memory=memory)

    def _note(self, trial: Trial, made: tuple[Plan, Candidate] | PlanError) -> None:
        if isinstance(made, PlanError):
            self.refusal = str(made)
        else:
            plan, candidate = made
            key = (trial.setup, plan.steps)
            if key not in self.seen and trial.kind.has(plan):
                self.seen.add(key)
                if candidate.memory.total <= self.work.memory_bytes:
                    # After equally fast ones, which came before it in the sweep.
                    bisect.insort(self.ranked, candidate, key=lambda c: -c.tokens_per_gpu_second)
                else:
                    self.too_large.append(candidate.memory)
        self.watch(len(self.tried), len(self.kinds))


def _best_of_layouts(ranked: Iterable[Candidate]) -> tuple[Candidate, ...]:
    best: dict[tuple[object, ...], Candidate] = {}
    for candidate in ranked:
        layout = candidate.layout
        sizes = (layout.dp, layout.tp, layout.pp, layout.vpp, layout.cp)
        best.setdefault((*sizes, candidate.kind), candidate)
    return tuple(best.values())


def _trials(
    work: Workload, space: Space, setups: list[Setup], kinds: list[Kind]
) -> Iterator[Trial]:
    """Budgets that fit, from the smallest on, each on the first setup that holds it."""
    for kind in kinds:
        for budget in _budgets(work, space, setups[0].layout, kind):
            trials = [Trial(setup, kind, budget, work.policy) for setup in setups]
            fitting = [one for one in trials if _memory(work, one).total <= work.memory_bytes]
            if not fitting:
                break
            policy = work.policy_of(fitting[0].setup, **kind._asdict())
            if _is_allowed(policy, fitting[0].layout):
                yield replace(fitting[0], policy=policy)


def _kinds(work: Workload, space: Space, layout: Layout) -> Iterator[Kind]:
    """The kinds to try.

    Rows of one DP rank are fixed. In a pipeline of one stage neither pieces nor weight gradients
    have waits to fill.
    """
    for names in itertools.product(space.context_parallel, space.split_samples, space.backward):
        kind = Kind(*names)
        is_wide = kind.context_parallel == "dynamic"
        if (is_wide and layout.dp == 1) or (kind.has_orders and layout.pp == 1):
            continue
        if _is_allowed(replace(work.policy, **kind._asdict()), layout):
            yield kind


def _is_allowed(policy: Policy, layout: Layout) -> bool:
    try:
        check_policy(policy, layout)
    except ConfigError:
        return False
    return True


def _budgets(work: Workload, space: Space, layout: Layout, kind: Kind) -> Iterator[int]:
    if space.budgets is not None:
        yield from sorted(space.budgets)
        return
    longest = _longest(work, layout)
    if kind.context_parallel == "dynamic":
        policy = replace(work.policy, context_parallel="dynamic")
        policy = policy.within(work.memory.sizes.max_width(layout), None)
        shared = [width for width in policy.widths(layout) if width <= _MAX_SHARERS]
        yield from (_longest(work, layout.over(width)) for width in reversed(shared))
    elif kind.split_samples == "auto":
        # All pieces of a sample are live at once, and a stage may hold pp budgets.
        unit = layout.row_alignment // layout.cp
        parts = [part for part in (1, 2, 4) if part <= layout.pp]
        yield from sorted({-(-longest // (part * unit)) * unit for part in parts})
    else:
        yield from (longest << doubling for doubling in range(_MAX_BUDGETS))


def _plan(work: Workload, trial: Trial) -> Plan:
    """Make the trial's plan.

    Raises:
        PlanError: the policy allows no legal plan, or leaves a sample that should be cut into
            pieces alone in its row.
    """
    policy = trial.policy
    is_cut = policy.split_samples == "auto"
    plan = build_dp_schedule(
        work.lengths,
        layout=trial.layout,
        max_tokens_per_gpu=trial.max_tokens_per_gpu,
        rollout_ids=work.rollout_ids,
        colocate_ids=work.colocate_ids,
        global_batch_size=work.global_batch_size,
        num_steps=work.num_steps,
        cost=work.cost_of(trial.setup),
        policy=replace(policy, oversize="error") if is_cut else policy,
        prefixes=work.prefixes,
        images=work.images,
        adapter_ids=work.adapter_ids,
    )
    return replace(plan, policy=policy)


def _bound(work: Workload, setup: Setup) -> float:
    """Tokens per second and GPU of a setup whose busiest stage never waits: no plan has more.

    64 layers on 64 stages: the last one has the head too, as much as 1.5 layers, so that no plan
    has more than 1 / 2.4 of the speed of one stage.
    """
    if work.prefixes is not None:
        return math.inf
    layout, cost = setup.layout, work.cost_of(setup)
    tokens = work.lengths.astype(np.float64)
    forward = cost.per_token * tokens + cost.per_token_sq * tokens**2 + cost.per_sample
    per_token = float(forward.sum() / tokens.sum()) or 1.0
    of_rank = per_token * cost.share_of_rank(layout) * cost.least_weights(layout)[0] / layout.dp
    return 1 / ((1 + cost.backward_ratio) * of_rank * layout.world_size)


def _memory(work: Workload, trial: Trial, plan: Plan | None = None) -> GpuMemory:
    """The fullest stage with full rows in flight.

    A sample over the budget is a longer row, or lies over as many ranks as hold it, or is split.

    Args:
        plan: decides G, what rows over several ranks gather, and what orders of operations hold;
            None: the layout's G, nothing.
    """
    layout = trial.layout
    row = trial.max_tokens_per_gpu
    if not trial.kind.cuts_samples:
        row = max(row, _longest(work, layout))
    held = {"live_tokens": row * layout.chunks_in_flight() / layout.vpp, "row_tokens": row}
    if plan is not None:
        held = full_rows(plan, row)
    executor: Executor = "operations" if trial.kind.has_orders else "megatron"
    memory = replace(work.memory_of(trial.setup), executor=executor)
    return memory.fullest_stage(layout, **held)


def _longest(work: Workload, layout: Layout) -> int:
    """Padded tokens per GPU of the longest sample."""
    return -(-layout.padded_tokens([int(work.lengths.max())]) // layout.cp)
