"""Layouts, budgets and rules for a number of GPUs, ranked by predicted speed.

    layouts of the GPUs -> budgets -> plans under each rule -> simulated, those that fit ranked

Of a large batch each plan is first made for a part of the samples on a part of the DP ranks: a rank
then has as many samples as before, of the same lengths. The fastest are planned whole.

The prediction covers the pipeline's bubbles, imbalance and padding, and what the cost model has.
It leaves out the communication of CP, EP and DP: compare layouts of equal cp and ep, and measure
the best few.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megapack.base.arrays import Ids, Ints, read_sets
from megapack.base.choices import Executor
from megapack.cost.memory import GpuMemory, MemoryModel
from megapack.cost.model import CostModel
from megapack.cost.sizes import typical_length
from megapack.cost.stages import StageLayers
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import ConfigError, PlanError
from megapack.layout import Layout
from megapack.outlook.stats import PlanReport, full_rows, plan_report
from megapack.outlook.tune_space import Kind, Space
from megapack.plan.plan import Plan, StepPlan
from megapack.policy import (
    Policy,
    check_policy,
)
from megapack.prefixes import SharedPrefixes

# Chosen by hand: by default the longest sample times 1, 2, 4, 8 and 16 is tried as budget.
_MAX_BUDGETS = 5
# With dynamic context parallelism it is the longest sample over 4, 2 and 1 DP ranks; and where
# samples may be split, a quarter, a half and all of it.
_MAX_SHARERS = 4
# The search of plans with rows over several ranks is limited to this: 38 plans of 1,000 samples on
# 64 GPUs take 4 s instead of a minute and are up to 0.4 % slower than with 2048.
_DYNAMIC_SEARCH = 256
# That of plans with orders of operations to this: a plan of 1,000 samples takes 0.1 s instead of
# 0.25 and is up to 3 % slower than with 256 (pp=4, split backwards), mostly 1 %.
_ORDER_SEARCH = 64
# A part of a batch has at least so many DP ranks and rollouts.
_LEAST_RANKS = 16
_LEAST_ROLLOUTS = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout, budget and policy, planned and simulated."""

    layout: Layout
    stage_layers: StageLayers
    max_tokens_per_gpu: int
    policy: Policy
    group_size: int | None
    """G of the first step."""
    report: PlanReport
    memory: GpuMemory
    """Memory of the fullest stage when every row in flight is full, as in a later batch."""
    share: int = 1
    """The report is of one of so many parts of the samples and of the DP ranks."""
    work_ratio: float = 1.0
    """Work per token of the samples that were planned, over that of all."""

    @property
    def kind(self) -> Kind:
        """What its plan may do."""
        return Kind(*(getattr(self.policy, name) for name in Kind._fields))

    @property
    def tokens_per_gpu_second(self) -> float:
        """Real tokens per second and GPU; candidates are ranked by it."""
        return self.report.tokens_per_gpu_second * self.work_ratio


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Result of a sweep."""

    ranked: tuple[Candidate, ...]
    """Candidates that fit into memory, the fastest first: all of them, or those that were planned
    whole."""
    num_layouts: int
    """Layouts, each with every split of its layers."""
    num_plans: int
    num_fitting: int
    """Plans that fit into memory."""
    num_left: int
    """Plans that were still to be made when the sweep was interrupted."""
    least_memory: GpuMemory
    """Memory of the layout that needs the least, at its smallest budget."""
    refusal: str | None
    """What keeps the last budget and policy that have no legal plan from one; None if all have."""

    @property
    def best_of_layouts(self) -> tuple[Candidate, ...]:
        """The fastest candidate of each layout and kind, the fastest first."""
        return _best_of_layouts(self.ranked)


class Progress(NamedTuple):
    """What a sweep has done."""

    done: int
    """Plans that were made, or have no legal plan."""
    num_plans: int
    """Plans to make."""
    best: Candidate | None
    """The fastest that fits so far."""


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
    """All settings but `count_rule`, `group_size` and the fields of `Kind`, which `Space` has.
    Plans with rows over several ranks are searched with at most 256, those with orders with 64."""
    memory: MemoryModel
    memory_bytes: int
    """Memory that one GPU may use."""
    cost_of: Callable[[Layout, StageLayers], CostModel]
    prefixes: SharedPrefixes | None = None
    """Tokens that samples have in common; None: nothing is shared."""

    def policy_of(self, layout: Layout, **changes: Any) -> Policy:
        """`policy` with these changes, within the model's limits."""
        memory = self.memory
        policy = replace(self.policy, **changes)
        return policy.within(memory.sizes.max_width(layout), memory.least_piece(layout))

    def part(self, share: int) -> Workload:
        """One of so many parts of the rollouts: the longest, and others evenly by length."""
        if share == 1:
            return self
        rollout_of, ids, _, colocate_ids = read_sets(
            self.rollout_ids, self.colocate_ids, self.lengths.size
        )
        longest_first = np.argsort(-np.bincount(rollout_of, weights=self.lengths), kind="stable")
        chosen = longest_first[share // 2 :: share]
        chosen[0] = longest_first[0]
        own = np.flatnonzero(np.isin(rollout_of, chosen)).tolist()
        size = self.global_batch_size
        return replace(
            self,
            lengths=self.lengths[own],
            rollout_ids=None if ids is None else tuple(ids[k] for k in own),
            colocate_ids=None if colocate_ids is None else tuple(colocate_ids[k] for k in own),
            global_batch_size=None if size is None else max(1, size // share),
        )

    def share_of(self, layout: Layout) -> int:
        """How many parts may be made of the DP ranks and rollouts; 1 if samples share prefixes."""
        if self.prefixes is not None:
            return 1
        num_rollouts = len(set(self.rollout_ids or self.colocate_ids or range(self.lengths.size)))
        most = min(layout.dp // _LEAST_RANKS, num_rollouts // _LEAST_ROLLOUTS)
        experts = layout.ep * layout.etp
        return max(
            share
            for share in range(1, max(1, most) + 1)
            if layout.dp % share == 0 and layout.dp // share * layout.cp * layout.tp % experts == 0
        )


class _Trial(NamedTuple):
    """A plan to make."""

    layout: Layout
    split: StageLayers
    kind: Kind
    budget: int
    policy: Policy


def tune(
    work: Workload,
    space: Space,
    *,
    num_whole: int | None = None,
    watch: Callable[[Progress], object] = lambda progress: None,
) -> Tuning:
    """Plan and simulate every candidate of a space.

    An interrupt (Ctrl-C) ends the sweep, with what it has found.

    Args:
        num_whole: plan parts of a large batch first, and so many of the fastest whole; None: all.
        watch: called after each plan.

    Raises:
        ConfigError: no layout fills the GPUs and divides the model, or `given_split` fits none, or
            nothing that `Kind` has is tried on any of them.
    """
    sizes = work.memory.sizes
    space.check_given_split(sizes)
    layouts = list(space.layouts(sizes, typical_length(work.lengths)))
    if not layouts:
        raise ConfigError(
            f"no layout of tp {list(space.tp)}, cp {list(space.cp)}, ep {list(space.ep)}, etp "
            f"{list(space.etp)} fills {space.num_gpus} GPUs and divides {sizes.num_layers} layers, "
            f"{sizes.num_attention_heads} heads and {sizes.num_experts or 'no'} experts; set other "
            "sizes"
        )
    kinds = [(*each, kind) for each in layouts for kind in _kinds(work, space, each[0])]
    if not kinds:
        raise ConfigError(
            f"context_parallel {list(space.context_parallel)}, split_samples "
            f"{list(space.split_samples)} and backward {list(space.backward)} are tried on none of "
            f"{len(layouts)} layouts: rows over several ranks need dp > 1, pieces and split "
            "backwards pp > 1; add fixed, off and joint, or other sizes"
        )
    sweep = _Sweep(work, space, watch)
    with contextlib.suppress(KeyboardInterrupt):
        sweep.run([trial for each in kinds for trial in _trials(work, space, *each)], num_whole)
    needs = (
        _memory(work, layout, split, min(_budgets(work, space, layout, kind)), kind)
        for layout, split, kind in kinds
    )
    return Tuning(
        ranked=tuple(sweep.ranked),
        num_layouts=len(layouts),
        num_plans=sweep.num_plans,
        num_fitting=sweep.num_fitting,
        num_left=sweep.progress.num_plans - sweep.progress.done,
        least_memory=min(needs, key=lambda memory: memory.total),
        refusal=sweep.refusal,
    )


class _Sweep:
    def __init__(self, work: Workload, space: Space, watch: Callable[[Progress], object]) -> None:
        self.work = work
        self.watch = watch
        self.ranked: list[Candidate] = []
        self.progress = Progress(0, 0, None)
        self.num_plans = 0
        self.num_fitting = 0
        self.refusal: str | None = None
        self.shares: dict[Layout, int] = {}
        self.parts: dict[int, Workload] = {}

    def run(self, trials: list[_Trial], num_whole: int | None) -> None:
        """Make the plans, which `ranked` then has."""
        self.shares = {
            trial.layout: 1 if num_whole is None else self.work.share_of(trial.layout)
            for trial in trials
        }
        self.progress = Progress(0, len(trials), None)
        for (layout, _), own in itertools.groupby(trials, key=lambda t: (t.layout, t.split)):
            self._plan_layout(layout, own)
        if num_whole is None or all(share == 1 for share in self.shares.values()):
            return
        best = _best_of_layouts(self.ranked)[:num_whole]
        self.progress = Progress(0, len(best), None)
        whole = []
        for candidate in best:
            whole.append(self._whole(candidate))
            self._watch(whole)
        # Only now, so that an interrupt leaves all that was found.
        self.ranked = sorted(whole, key=_slowness)

    def _plan_layout(self, layout: Layout, trials: Iterator[_Trial]) -> None:
        """Add the plans of one layout and split to `ranked`, if they differ and fit."""
        share = self.shares[layout]
        if share not in self.parts:
            self.parts[share] = self.work.part(share)
        seen: set[tuple[StepPlan, ...]] = set()
        for trial in trials:
            try:
                plan = _plan(self.parts[share], trial, share)
            except PlanError as error:
                self.refusal = str(error)
            else:
                if plan.steps not in seen and trial.kind.has(plan):
                    seen.add(plan.steps)
                    self._add(_candidate(self.work, self.parts[share], trial, plan, share))
            self._watch(self.ranked)

    def _add(self, candidate: Candidate) -> None:
        self.num_plans += 1
        if candidate.memory.total <= self.work.memory_bytes:
            self.num_fitting += 1
            # After equally fast ones, which came before it in the sweep.
            bisect.insort(self.ranked, candidate, key=_slowness)

    def _whole(self, candidate: Candidate) -> Candidate:
        """The candidate with the plan of all samples; itself if that is not legal."""
        if candidate.share == 1:
            return candidate
        names = ("layout", "stage_layers", "kind", "max_tokens_per_gpu", "policy")
        trial = _Trial(*(getattr(candidate, name) for name in names))
        try:
            plan = _plan(self.work, trial, 1)
        except PlanError as error:
            logger.warning("%s: %s; its numbers are of a part", candidate.layout.label, error)
            return candidate
        return _candidate(self.work, self.work, trial, plan, 1)

    def _watch(self, found: list[Candidate]) -> None:
        best = min(found, key=_slowness, default=None)
        self.progress = Progress(self.progress.done + 1, self.progress.num_plans, best)
        self.watch(self.progress)


def _slowness(candidate: Candidate) -> float:
    """Candidates are sorted by it: the fastest first."""
    return -candidate.tokens_per_gpu_second


def _best_of_layouts(ranked: Iterable[Candidate]) -> tuple[Candidate, ...]:
    best: dict[tuple[Layout, Kind], Candidate] = {}
    for candidate in ranked:
        best.setdefault((candidate.layout, candidate.kind), candidate)
    return tuple(best.values())


def _trials(
    work: Workload, space: Space, layout: Layout, split: StageLayers, kind: Kind
) -> Iterator[_Trial]:
    """Budgets that fit, from the smallest on, under each policy."""
    for budget in _budgets(work, space, layout, kind):
        if _memory(work, layout, split, budget, kind).total > work.memory_bytes:
            break
        for policy in _policies(work, space, layout, kind):
            yield _Trial(layout, split, kind, budget, policy)


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
        if _is_allowed(replace(work.policy, count_rule="legal", **kind._asdict()), layout):
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
        policy = work.policy_of(layout, context_parallel="dynamic", count_rule="legal")
        shared = [width for width in policy.widths(layout) if width <= _MAX_SHARERS]
        yield from (_longest(work, layout.over(width)) for width in reversed(shared))
    elif kind.split_samples == "auto":
        # All pieces of a sample are live at once, and a stage may hold pp budgets.
        unit = layout.row_alignment // layout.cp
        parts = [part for part in (1, 2, 4) if part <= layout.pp]
        yield from sorted({-(-longest // (part * unit)) * unit for part in parts})
    else:
        yield from (longest << doubling for doubling in range(_MAX_BUDGETS))


def _policies(work: Workload, space: Space, layout: Layout, kind: Kind) -> Iterator[Policy]:
    search = work.policy.search
    rules, groups = space.count_rules, space.group_sizes
    if kind.context_parallel == "dynamic":
        search = min(search, _DYNAMIC_SEARCH)
    if kind.has_orders:
        search = min(search, _ORDER_SEARCH)
        rules, groups = rules[:1], groups[:1]
    for rule, group in itertools.product(rules, groups):
        policy = work.policy_of(
            layout, count_rule=rule, group_size=group, search=search, **kind._asdict()
        )
        one_count = rule == "per_rank" and layout.dp == 1
        one_group = group == "search" and layout.vpp == 1
        if not one_count and not one_group and _is_allowed(policy, layout):
            yield policy


def _plan(work: Workload, trial: _Trial, share: int) -> Plan:
    """Plan for a part of the DP ranks.

    Args:
        work: the samples of that part.

    Raises:
        PlanError: the policy allows no legal plan, or leaves a sample that should be cut into
            pieces alone in its row.
    """
    policy = trial.policy
    is_cut = policy.split_samples == "auto"
    plan = build_dp_schedule(
        work.lengths,
        layout=replace(trial.layout, dp=trial.layout.dp // share),
        max_tokens_per_gpu=trial.budget,
        rollout_ids=work.rollout_ids,
        colocate_ids=work.colocate_ids,
        global_batch_size=work.global_batch_size,
        num_steps=work.num_steps,
        cost=work.cost_of(trial.layout, trial.split),
        policy=replace(policy, oversize="error") if is_cut else policy,
        prefixes=work.prefixes,
    )
    return replace(plan, policy=policy)


def _candidate(work: Workload, part: Workload, trial: _Trial, plan: Plan, share: int) -> Candidate:
    """A plan of a part of the work, simulated."""
    cost = work.cost_of(trial.layout, trial.split)
    return Candidate(
        layout=trial.layout,
        stage_layers=trial.split,
        max_tokens_per_gpu=trial.budget,
        policy=plan.policy,
        group_size=plan.steps[0].group_size,
        report=plan_report(plan, part.lengths, cost),
        memory=_memory(work, trial.layout, trial.split, trial.budget, trial.kind, plan),
        share=share,
        work_ratio=_work_per_token(part.lengths, cost) / _work_per_token(work.lengths, cost),
    )


def _work_per_token(lengths: Ints, cost: CostModel) -> float:
    tokens = lengths.astype(np.float64)
    work = cost.per_token * tokens + cost.per_token_sq * tokens**2 + cost.per_sample
    return float(work.sum() / tokens.sum()) or 1.0


def _memory(
    work: Workload,
    layout: Layout,
    split: StageLayers,
    budget: int,
    kind: Kind,
    plan: Plan | None = None,
) -> GpuMemory:
    """The fullest stage with full rows in flight.

    A sample over the budget is a longer row, or lies over as many ranks as hold it, or is split.

    Args:
        plan: decides G, what rows over several ranks gather, and what orders of operations hold;
            None: the layout's G, nothing.
    """
    row = budget if kind.cuts_samples else max(budget, _longest(work, layout))
    held = {"live_tokens": row * layout.chunks_in_flight() / layout.vpp, "row_tokens": row}
    if plan is not None:
        held = full_rows(plan, row)
    executor: Executor = "operations" if kind.has_orders else "megatron"
    memory = replace(work.memory, stage_layers=split, executor=executor)
    return memory.fullest_stage(layout, **held)


def _longest(work: Workload, layout: Layout) -> int:
    """Padded tokens per GPU of the longest sample."""
    return -(-layout.padded_tokens([int(work.lengths.max())]) // layout.cp)
