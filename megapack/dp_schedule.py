"""`build_dp_schedule`: sample lengths -> `Plan`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megapack.base.arrays import Ids, Ints, read_budget, read_lengths, read_sets
from megapack.cost.model import CostModel
from megapack.errors import ConfigError, PlanError, brief
from megapack.layout import Layout, round_up
from megapack.pipeline.simulator import simulate
from megapack.plan.plan import Plan, RolloutId, StepPlan
from megapack.planner.counts import keep_reachable, split_rollouts
from megapack.planner.families import with_own_sharing
from megapack.planner.operations import plan_operations
from megapack.planner.pieces import may_cut
from megapack.planner.problem import StepDraft, StepProblem, build_step
from megapack.planner.search import plan_rows
from megapack.planner.sharing import plan_shared_rows
from megapack.planner.wide import plan_wide_rows
from megapack.policy import Policy, check_dynamic_cp, check_ranks_are_apart, check_split_samples
from megapack.prefixes import PrefixTable, SharedPrefixes, worthwhile

# Limit on the seconds of a whole batch as one row. Sums over many rows then stay finite: 2**60 rows
# of 1e200 s are 1.2e218 s, and fp64 ends at 1.8e308.
_MAX_SECONDS = 1e200

logger = logging.getLogger(__name__)


def build_dp_schedule(
    lengths: Sequence[int] | Ints,
    *,
    layout: Layout,
    max_tokens_per_gpu: int | None = None,
    micro_batch_size: int | None = None,
    rollout_ids: Sequence[RolloutId] | None = None,
    colocate_ids: Sequence[RolloutId] | None = None,
    global_batch_size: int | None = None,
    num_steps: int | None = None,
    cost: CostModel | None = None,
    policy: Policy | None = None,
    forward_only: bool = False,
    prefixes: SharedPrefixes | None = None,
) -> Plan:
    """Plan the micro-batches of a batch of samples.

    Equal arguments give an equal plan in any process: nothing is random, and the search counts
    evaluations, not time.

    Args:
        lengths: tokens per sample before any padding, each at least 1.
        layout: how the model is spread over GPUs.
        max_tokens_per_gpu: the budget: padded tokens that a row may hold on one GPU, after CP. A
            row holds at most this times cp. None makes a count-based plan.
        micro_batch_size: samples per micro-batch of a count-based plan.
        rollout_ids: per sample an int or str; samples with the same id stay in one step. None: each
            sample (or each colocated set) is its own rollout, and the id is its index.
        colocate_ids: per sample an int or str; samples with the same id stay in one micro-batch, as
            pairs of a preference loss must. They belong to one rollout. None: no sample has to
            share a micro-batch.
        global_batch_size: rollouts per step; the last step gets the rest.
        num_steps: number of steps, of about equal tokens, in place of global_batch_size. Without
            either number, there is one step.
        cost: seconds of a micro-batch; None counts tokens.
        policy: what the planner may choose; None for the defaults.
        forward_only: plan a pass without backwards.
        prefixes: tokens that samples have in common at their beginnings; under
            `Policy(share_prefixes="auto")` a row holds them once, where that pays. None: nothing is
            shared.

    Raises:
        DataError: invalid lengths, ids or prefixes.
        ConfigError: arguments that contradict each other.
        PlanError: the policy allows no legal plan; the message says what to set.
    """
    policy = policy or Policy()
    _check_combination(layout, policy, cost)
    check_dynamic_cp(policy, micro_batch_size)
    check_split_samples(policy, layout, micro_batch_size)
    budget = read_budget(layout, max_tokens_per_gpu, micro_batch_size)
    batch = _read_batch(lengths, rollout_ids, colocate_ids, layout)
    _check_set_sizes(batch, micro_batch_size)
    _check_cost(batch, layout, cost)
    table = None
    if prefixes is not None:
        _check_prefixes(prefixes, batch)
        prefixes = _kept_prefixes(prefixes, batch, layout, policy)
    if prefixes is not None:
        table = PrefixTable(prefixes, batch.lengths.size, layout)
    _check_oversize(batch, budget, layout, policy, table)
    steps = split_rollouts(
        batch.rollout_tokens(),
        global_batch_size=global_batch_size,
        num_steps=num_steps,
        step_split=policy.step_split,
    )
    problems = batch.problems(
        steps,
        capacity=_row_capacity(budget, layout, policy, forward_only),
        max_samples=None if micro_batch_size is None else int(micro_batch_size),
        layout=layout,
        policy=policy,
        cost=cost,
        forward_only=forward_only,
        prefixes=table,
    )
    planned = tuple(_plan_step(problem, batch, budget) for problem in problems)
    if prefixes is not None and not any(
        mb.shared_tokens for step in planned for mb in step.microbatches
    ):
        prefixes = None
    return Plan(
        steps=planned,
        layout=layout,
        policy=policy,
        max_tokens_per_gpu=None if max_tokens_per_gpu is None else int(max_tokens_per_gpu),
        micro_batch_size=None if micro_batch_size is None else int(micro_batch_size),
        num_samples=batch.lengths.size,
        rollout_ids=batch.ids,
        colocate_ids=batch.colocate_ids,
        forward_only=forward_only,
        prefixes=prefixes,
    )


@dataclass(frozen=True)
class _Batch:
    """All samples, n of them, of R rollouts."""

    lengths: Ints
    aligned: Ints
    rollout_of: Ints
    """int64 [n]: each sample's rollout, numbered in order of first appearance."""
    ids: Ids | None
    """Per sample its rollout's id; None if no ids were given."""
    item_of: Ints
    """int64 [n]: each sample's item, numbered in order of first appearance. Samples of one item are
    packed into one row."""
    colocate_ids: Ids | None
    """Per sample its colocate id; None if no ids were given."""

    @cached_property
    def names(self) -> Sequence[RolloutId]:
        """The id of each rollout number."""
        return range(self.lengths.size) if self.ids is None else tuple(dict.fromkeys(self.ids))

    def names_of(self, rollouts: Ints) -> tuple[RolloutId, ...]:
        """The ids of rollout numbers."""
        numbers = rollouts.tolist()
        if self.ids is None:
            return tuple(numbers)  # A range numbers itself.
        return tuple(map(self.names.__getitem__, numbers))

    def rollout_tokens(self) -> Ints:
        """int64 [R]: aligned tokens of each rollout."""
        tokens = np.zeros(len(self.names), dtype=np.int64)
        np.add.at(tokens, self.rollout_of, self.aligned)
        return tokens

    def problems(
        self,
        steps: list[Ints],
        *,
        capacity: int,
        max_samples: int | None,
        layout: Layout,
        policy: Policy,
        cost: CostModel | None,
        forward_only: bool,
        prefixes: PrefixTable | None,
    ) -> Iterator[StepProblem]:
        """One problem per step.

        Items are sorted by rollout, so that a prefix of the step's rollouts is a prefix of its
        items: "drop" plans such a prefix.
        """
        step_of = np.empty(len(self.names), dtype=np.int64)
        for number, rollouts in enumerate(steps):
            step_of[rollouts] = number
        order = np.lexsort((self.item_of, self.rollout_of, step_of[self.rollout_of]))
        sizes = np.bincount(step_of[self.rollout_of], minlength=len(steps))
        for number, samples in enumerate(np.split(order, np.cumsum(sizes)[:-1])):
            starts = np.flatnonzero(np.diff(self.item_of[samples], prepend=-1))
            aligned = self.aligned[samples]
            yield StepProblem(
                number=number,
                samples=samples,
                item_samples=np.diff(starts, append=samples.size),
                lengths=np.add.reduceat(self.lengths[samples], starts),
                aligned=np.add.reduceat(aligned, starts),
                aligned_sq=np.add.reduceat(aligned * aligned, starts),
                shared=np.zeros(starts.size, dtype=np.int64),
                shared_sq=np.zeros(starts.size, dtype=np.int64),
                capacity=capacity,
                max_samples=max_samples,
                layout=layout,
                policy=policy,
                cost=cost,
                forward_only=forward_only,
                prefixes=prefixes,
                batch_lengths=self.lengths,
            )


def _read_batch(
    lengths: Sequence[int] | Ints,
    rollout_ids: Sequence[RolloutId] | None,
    colocate_ids: Sequence[RolloutId] | None,
    layout: Layout,
) -> _Batch:
    flat = read_lengths(lengths)
    sets = read_sets(rollout_ids, colocate_ids, flat.size)
    return _Batch(flat, layout.aligned_sample_tokens(flat), *sets)


def _check_prefixes(prefixes: SharedPrefixes, batch: _Batch) -> None:
    if not isinstance(prefixes, SharedPrefixes):
        raise ConfigError(
            f"prefixes={brief(prefixes)}; give SharedPrefixes, for example from_samples(token_ids)"
        )
    prefixes.check(batch.lengths)


def _kept_prefixes(
    prefixes: SharedPrefixes, batch: _Batch, layout: Layout, policy: Policy
) -> SharedPrefixes | None:
    """The prefixes that pay; None if none does, or the policy shares nothing."""
    if policy.share_prefixes == "off":
        return None
    kept = worthwhile(prefixes, batch.aligned, layout)
    return kept if kept.order else None


def _plan_step(problem: StepProblem, batch: _Batch, budget: int) -> StepPlan:
    first_samples = problem.samples[np.cumsum(problem.item_samples) - problem.item_samples]
    rollouts, num_items = np.unique(batch.rollout_of[first_samples], return_counts=True)
    ids = batch.names_of(rollouts)
    sharing = problem
    if problem.prefixes is not None and batch.colocate_ids is not None:
        sharing = with_own_sharing(problem, problem.prefixes)
    kept, num_kept = keep_reachable(sharing, np.cumsum(num_items))
    loose = problem.take(kept.num_items)
    policy = problem.policy
    if policy.split_samples == "auto" or (policy.backward == "split" and not kept.forward_only):
        kept, draft = _plan_with_operations(loose, kept, budget)
    elif policy.context_parallel == "dynamic":
        kept, draft = _plan_dynamic(loose, kept, budget)
    else:
        kept, draft = _plan_narrow_rows(loose, kept)
    return build_step(kept, draft, ids[:num_kept], ids[num_kept:])


def _plan_with_operations(
    loose: StepProblem, problem: StepProblem, budget: int
) -> tuple[StepProblem, StepDraft]:
    """The fastest of a draft in Megatron's order, one with rows over several ranks where the policy
    allows them, and one in an order of its own, which may have pieces.

    A sample over the budget is cut, if samples may be.

    Args:
        budget: padded tokens that a row of one DP rank may hold; -1 without a budget.
    """
    policy = problem.policy
    cuts = policy.split_samples == "auto" and may_cut(problem)
    over = cuts and bool(((problem.item_samples == 1) & (problem.aligned > budget)).any())
    narrow: StepDraft | None = None
    wide: StepDraft | None = None
    refused: PlanError | None = None
    try:
        if policy.context_parallel == "dynamic":
            problem, narrow, wide = _plan_both_widths(loose, problem, budget)
        elif not over:
            problem, narrow = _plan_narrow_rows(loose, problem)
    except PlanError as error:
        if not cuts:
            raise
        # Whole rows are over the cap on live tokens, or a sample over the budget is nowhere whole.
        logger.info("%s; trying pieces of samples", error)
        refused = error
    found = plan_operations(problem, narrow, budget)
    if found is not None and (wide is None or found.seconds < _seconds(problem, wide)):
        return found.problem, found.draft
    draft = wide or narrow
    if draft is not None:
        return problem, draft
    return _plan_uncut(loose, problem, budget, refused)


def _seconds(problem: StepProblem, draft: StepDraft) -> float:
    """Simulated seconds of a draft's step by the cost model."""
    simulation = simulate(
        build_step(problem, draft, (), ()),
        layout=problem.layout,
        cost=problem.cost,
        lockstep=problem.layout.ep_spans_dp,
        forward_only=problem.forward_only,
    )
    return simulation.makespan


def _plan_uncut(
    loose: StepProblem, problem: StepProblem, budget: int, refused: PlanError | None
) -> tuple[StepProblem, StepDraft]:
    """The draft if neither whole samples in rows within the budget nor pieces are possible: under
    oversize="alone" with samples over the budget alone in their rows.

    Raises:
        PlanError: `refused`, or what keeps samples over the budget from being cut.
    """
    if refused is not None:
        raise refused
    item = int(np.where(problem.item_samples == 1, problem.aligned, 0).argmax())
    sample = int(problem.samples[problem.item_samples[:item].sum()])
    tokens = int(problem.aligned[item])
    layout = problem.layout
    what = (
        f"step {problem.number}: sample {sample} has {tokens} padded tokens, over the budget of "
        f"{budget} per row, and no order of its pieces was found that holds them: all pieces are "
        f"live at once, {-(-tokens // layout.cp)} tokens per GPU on each of pp={layout.pp} stages "
        f"(max_live_tokens_per_gpu={problem.policy.max_live_tokens_per_gpu})"
    )
    if problem.policy.oversize == "error" or problem.policy.context_parallel == "dynamic":
        raise PlanError(
            f"{what}; set max_live_tokens_per_gpu to {2 * -(-tokens // layout.cp)} or more, raise "
            "max_tokens_per_gpu, or set oversize='alone'"
        )
    logger.warning("%s; it is alone in its row", what)
    return _plan_narrow_rows(loose, problem)


def _plan_narrow_rows(loose: StepProblem, problem: StepProblem) -> tuple[StepProblem, StepDraft]:
    """The best draft of rows on one DP rank each, and the problem that it is a draft of.

    Args:
        loose: the items without what their samples share.
    """
    if problem.prefixes is None:
        return problem, plan_rows(problem)
    return plan_shared_rows(loose, problem)


def _plan_dynamic(
    loose: StepProblem, problem: StepProblem, budget: int
) -> tuple[StepProblem, StepDraft]:
    """The same under context_parallel="dynamic": rows may lie over several DP ranks.

    Args:
        budget: padded tokens that a row of one DP rank may hold.
    """
    problem, narrow, wide = _plan_both_widths(loose, problem, budget)
    draft = wide or narrow
    assert draft is not None
    return problem, draft


def _plan_both_widths(
    loose: StepProblem, problem: StepProblem, budget: int
) -> tuple[StepProblem, StepDraft | None, StepDraft | None]:
    """The best draft of rows on one DP rank each, and the one with rows over several if it is
    faster; at least one is not None."""
    narrow = None
    try:
        problem, narrow = _plan_narrow_rows(loose, problem)
    except PlanError as error:
        # Rows of one rank are over the cap on live tokens; shorter ones may not be.
        logger.info("%s; trying rows over several ranks", error)
    if int(problem.aligned.max()) > budget:
        narrow = None
    draft = plan_wide_rows(problem, narrow, budget)
    return problem, narrow, None if draft is narrow else draft


def _row_capacity(budget: int, layout: Layout, policy: Policy, forward_only: bool) -> int:
    """Padded tokens per row: the budget, or less if `max_live_tokens_per_gpu` leaves less to a row.

    Stage 0 of pp=4 1F1B holds the activations of 4 rows, so a cap of 32,768 live tokens leaves
    8,192 tokens to each. A forward-only pass holds one chunk of one row.
    """
    if policy.max_live_tokens_per_gpu is None or budget < 0:
        return budget
    group = layout.pp if policy.group_size == "search" else layout.group_size
    chunks = 1 if forward_only else layout.chunks_in_flight(group_size=group)
    tokens = policy.max_live_tokens_per_gpu * layout.cp * layout.vpp // chunks
    unit = layout.row_alignment
    return min(budget, max(tokens // unit * unit, unit))


def _check_combination(layout: Layout, policy: Policy, cost: CostModel | None) -> None:
    check_ranks_are_apart(policy, layout)
    if cost is not None:
        cost.weights_for(layout)


def _check_cost(batch: _Batch, layout: Layout, cost: CostModel | None) -> None:
    """Raise ConfigError if sums of seconds could overflow; the search compares such sums."""
    if cost is None:
        return
    tokens = int(batch.aligned.sum())
    num_samples = batch.lengths.size
    seconds = cost.forward_seconds(
        layout, row_tokens=tokens, tokens_sq=tokens**2, num_samples=num_samples
    )
    seconds = (seconds + cost.fixed * num_samples) * (1 + cost.backward_ratio) + cost.p2p
    if not seconds < _MAX_SECONDS:
        raise ConfigError(
            f"the cost model gives {seconds:.3g} seconds for {num_samples} samples of {tokens} "
            "tokens; set coefficients in seconds"
        )


def _check_set_sizes(batch: _Batch, micro_batch_size: int | None) -> None:
    """Raise ConfigError if a colocated set has more samples than a micro-batch may have."""
    if micro_batch_size is None or batch.colocate_ids is None:
        return
    sizes = np.bincount(batch.item_of)
    if int(sizes.max()) > micro_batch_size:
        samples = np.flatnonzero(batch.item_of == sizes.argmax()).tolist()
        raise ConfigError(
            f"{len(samples)} samples share the colocate id {batch.colocate_ids[samples[0]]!r} "
            f"(the first is sample {samples[0]}), micro_batch_size={micro_batch_size}; set it to "
            f"{len(samples)} or more"
        )


def _check_oversize(
    batch: _Batch, budget: int, layout: Layout, policy: Policy, table: PrefixTable | None
) -> None:
    """Raise PlanError for items over the budget, or log them if they may be planned.

    A colocated set is as large as the positions that a row of its samples holds. Under
    oversize="alone" such an item may have a row of its own. Under context_parallel="dynamic" it
    goes over several DP ranks, whatever `oversize` says, and must fit on some number of them.
    """
    if budget < 0:
        return
    tokens = _item_tokens(batch, layout, table, 1)
    over = np.flatnonzero(tokens > budget)
    if not over.size:
        return
    dynamic = policy.context_parallel == "dynamic"
    if policy.split_samples == "auto" and table is None:
        alone = np.bincount(batch.item_of)[over] == 1
        if alone.any():
            logger.info(
                "%d sample(s) over the budget of %d padded tokens per row are cut into pieces",
                int(alone.sum()),
                budget,
            )
        over = over[~alone]
        if not over.size:
            return
    if dynamic:
        least = _least_budgets(batch, layout, table)
        beyond = over[least[over] > budget]
        over = beyond if beyond.size else over
    samples = np.flatnonzero(batch.item_of == over[0]).tolist()
    held = int(layout.aligned_row_tokens(int(tokens[over[0]])))
    name = f"sample {samples[0]}"
    kind = "sample(s)"
    if batch.colocate_ids is not None:
        name = f"samples {samples} of colocate id {batch.colocate_ids[samples[0]]!r}"
        kind = "colocated set(s)"
    lengths = batch.lengths[samples].tolist()
    what = (
        f"{over.size} {kind} over the budget of {budget} padded tokens per row (max_tokens_per_gpu "
        f"* cp={layout.cp}, rounded down to {layout.row_alignment}); the first is {name}: "
        f"{sum(lengths)} tokens, {held} padded"
    )
    if dynamic and beyond.size:
        wanted = -(-int(least[beyond].max()) // layout.cp)
        raise PlanError(
            f"{what}, which no aligned block of up to {layout.widths[-1]} of dp={layout.dp} ranks "
            f"holds (context_parallel='dynamic'); set max_tokens_per_gpu to {wanted} or more"
        )
    if dynamic:
        logger.info("%s; each goes over as many DP ranks as hold it", what)
        return
    if policy.oversize == "error":
        raise PlanError(f"{what}; raise max_tokens_per_gpu or set oversize='alone'")
    logger.warning("%s; each is alone in its row", what)


def _item_tokens(batch: _Batch, layout: Layout, table: PrefixTable | None, width: int) -> Ints:
    """int64 [I]: padded tokens of each item in a row over `width` DP ranks."""
    tokens = np.zeros(int(batch.item_of.max()) + 1, dtype=np.int64)
    np.add.at(tokens, batch.item_of, layout.over(width).aligned_sample_tokens(batch.lengths))
    if table is not None and batch.colocate_ids is not None:
        everyone = np.arange(batch.item_of.size)
        tokens -= table.over(width).saved(everyone, batch.item_of, tokens.size)[0]
    return tokens


def _least_budgets(batch: _Batch, layout: Layout, table: PrefixTable | None) -> Ints:
    """int64 [I]: the least budget of a row of one DP rank with which some width holds each item.

    At cp=1, 100 tokens over four ranks are padded to 104, of which each rank holds 26.
    """
    least = _item_tokens(batch, layout, table, 1)
    for width in layout.widths[1:]:
        tokens = _item_tokens(batch, layout, table, width)
        row = layout.over(width).aligned_row_tokens(tokens)
        least = np.minimum(least, -(-row // width))
    return np.asarray(round_up(least, layout.row_alignment), dtype=np.int64)
