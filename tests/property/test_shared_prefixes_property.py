"""Random forests of samples: plans that share keep the invariants and are never slower."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapack import (
    CostModel,
    Layout,
    Plan,
    SharedPrefixes,
    check_plan,
    simulate,
)
from megapack.prefixes import PrefixTable, row_branches, sequences
from tests import strategies
from tests.strategies import planned, replanned

pytestmark = pytest.mark.property

EXAMPLES = int(os.environ.get("MEGAPACK_EXAMPLES", "2000"))


@st.composite
def forests(draw: st.DrawFn, largest: int = 40) -> list[list[int]]:
    """Samples that grow from each other: each continues a prefix of an earlier one, or a new one.

    Tokens are numbers that never repeat, so samples have in common just what they were given.
    """
    samples: list[list[int]] = []
    fresh = iter(range(10**6))
    longest = draw(st.sampled_from([3, 40, 200]))
    for _ in range(draw(st.integers(1, largest))):
        begin: list[int] = []
        if samples and draw(st.integers(0, 4)):
            other = samples[draw(st.integers(0, len(samples) - 1))]
            begin = other[: draw(st.integers(0, len(other)))]
        more = draw(st.integers(0 if begin else 1, longest))
        samples.append([*begin, *(next(fresh) for _ in range(more))])
    return samples


def any_layout(choose: strategies.Choose) -> Layout:
    return strategies.layout(choose, pp=(1, 1, 2, 4), cp=(1, 1, 2, 4))


@st.composite
def arguments(draw: st.DrawFn) -> tuple[list[list[int]], dict[str, Any]]:
    choose = strategies.chooser(draw)
    samples = draw(forests())
    size = len(samples)
    budget = draw(st.none() | st.integers(1, 600))
    rollouts = draw(st.none() | st.lists(st.integers(0, size), min_size=size, max_size=size))
    sets = None
    if draw(st.integers(0, 2)) == 0:
        sets = [draw(st.integers(0, size // 2)) for _ in samples]
        rollouts = None if rollouts is None else [rollouts[k] for k in sets]
    steps = draw(st.sampled_from(["one", "size", "count"]))
    return samples, {
        "layout": any_layout(choose),
        "max_tokens_per_gpu": budget,
        "micro_batch_size": draw(st.integers(1, 5)) if budget is None else None,
        "rollout_ids": rollouts,
        "colocate_ids": sets,
        "adapter_ids": draw(st.none() | st.lists(st.integers(0, 1), min_size=size, max_size=size)),
        "global_batch_size": draw(st.integers(1, 20)) if steps == "size" else None,
        "num_steps": draw(st.integers(1, 3)) if steps == "count" else None,
        "cost": strategies.cost(choose, per_token_sq=(0.0, 1e-3, 1.0), backward_ratio=(0.0, 2.0)),
        "policy": strategies.policy(
            choose, context_parallel=("fixed",), split_samples=("off",), backward=("joint",)
        ),
        "forward_only": draw(st.booleans()),
    }


def num_common(first: list[int], second: list[int]) -> int:
    """Equal tokens at the beginnings of two samples, one by one."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def seconds(plan: Plan, cost: CostModel | None) -> list[float]:
    """Simulated seconds of each step."""
    lockstep = plan.layout.ep_spans_dp
    return [
        simulate(
            step,
            layout=plan.layout,
            cost=cost,
            lockstep=lockstep,
            forward_only=plan.forward_only,
        ).makespan
        for step in plan.steps
    ]


def check(samples: list[list[int]], options: dict[str, Any]) -> None:
    """Plan with and without prefixes, and compare."""
    lengths = [len(ids) for ids in samples]
    alone = planned(lengths, options)
    sharing = {**options, "prefixes": SharedPrefixes.from_samples(samples)}
    plan = planned(lengths, sharing)
    assert alone is None or plan is not None
    if plan is None:
        return
    check_plan(plan, lengths)
    replanned(plan, lengths, sharing)
    shared = sum(mb.shared_tokens for step in plan.steps for mb in step.microbatches)
    assert (plan.prefixes is None) == (shared == 0)
    cap = plan.policy.max_live_tokens_per_gpu
    for step in plan.steps:
        simulation = simulate(step, layout=plan.layout, forward_only=plan.forward_only)
        assert cap is None or simulation.peak_live_tokens <= cap
        real = [mb for mb in step.microbatches if mb.samples]
        has_padding = len(real) < sum(map(len, step.ranks))
        sets = plan.colocate_ids or range(len(samples))
        assert not has_padding or all(len({sets[i] for i in mb.samples}) == 1 for mb in real)
    if alone is None:
        return
    cost = options["cost"]
    assert cost is None or isinstance(cost, CostModel)
    pairs = zip(plan.steps, alone.steps, seconds(plan, cost), seconds(alone, cost), strict=True)
    for step, other, with_, without in pairs:
        # Rows of few lengths have other lengths with prefixes.
        if step.kept_rollouts == other.kept_rollouts and not plan.row_lengths:
            assert with_ <= without


@given(arguments())
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_plans_with_prefixes_are_valid_and_never_slower(
    drawn: tuple[list[list[int]], dict[str, Any]],
) -> None:
    check(*drawn)


@pytest.mark.slow
@given(arguments())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_thousands_of_plans_with_prefixes(
    drawn: tuple[list[list[int]], dict[str, Any]],
) -> None:
    check(*drawn)


@given(forests(largest=14), st.data())
@settings(max_examples=150, deadline=None)
def test_what_a_row_saves_and_its_branches_are_those_of_its_tokens(
    samples: list[list[int]], data: st.DataObject
) -> None:
    layout = any_layout(strategies.chooser(data.draw))
    unit = layout.sample_alignment
    prefixes = SharedPrefixes.from_samples(samples)
    prefixes.check(np.array([len(ids) for ids in samples]))
    table = PrefixTable(prefixes, [*map(len, samples)], layout)
    everyone = list(range(len(samples)))
    row = data.draw(st.permutations(everyone))[: data.draw(st.integers(1, len(samples)))]
    aligned = [layout.aligned_sample_tokens(len(samples[i])) for i in row]
    # Position at of sample i is shared with j if both have its whole unit in common, and the token
    # after it, or if the one ends and the other goes on: each (unit, samples that hold it) is one
    # set of held positions.
    in_order = sorted(everyone, key=lambda i: (samples[i], i))
    links = []
    for i, j in itertools.pairwise(in_order):
        both = num_common(samples[i], samples[j])
        whole = both == len(samples[i]) and both > 1
        links.append(layout.aligned_sample_tokens(both) if whole else (both - 1) // unit * unit)

    def num_shared(i: int, j: int) -> int:
        first, last = sorted(in_order.index(k) for k in (i, j))
        return max(0, min(links[first:last]))

    owner = {}
    for i, size in zip(row, aligned, strict=True):
        for at in range(size):
            held_by = min(
                (j for j in row if j == i or at < num_shared(i, j)),
            )
            owner[i, at] = held_by
    held = sum(i == holder for (i, _), holder in owner.items())
    tokens, _ = table.saved(np.array(row), np.zeros(len(row), dtype=np.int64), 1)
    assert int(tokens[0]) == sum(aligned) - held
    branches = row_branches(row, [len(samples[i]) for i in row], layout, table)
    assert sum(branch.tokens for branch in branches) == held
    start = 0
    covered = [0] * len(row)
    for k, branch in enumerate(branches):
        assert branch.start == start
        start += branch.tokens
        for i in branch.samples:
            assert branch.offset == covered[i]
            covered[i] += branch.tokens
        below = [b for b in branches[k:] if set(b.samples) <= set(branch.samples)]
        assert branch.end == start + sum(b.tokens for b in below[1:])
        parent = None if branch.parent < 0 else branches[branch.parent]
        assert parent is None or set(branch.samples) <= set(parent.samples)
        assert branch.offset == (0 if parent is None else parent.offset + parent.tokens)
    for i, end, most in zip(row, covered, aligned, strict=True):
        assert len(samples[i]) <= end <= most
    joined = sequences(branches)
    assert sum(sequence.tokens for sequence in joined) == held
    assert all(sequence.tokens % unit == 0 for sequence in joined)
    parted = [sequence.parent for sequence in joined if sequence.parent >= 0]
    assert all(parted.count(parent) > 1 for parent in parted)
