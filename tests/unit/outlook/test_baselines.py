"""Simple packing strategies, and those of other schedulers."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from megapack import ConfigError, CostModel, Layout, build_dp_schedule, check_plan
from megapack.outlook import baselines
from megapack.outlook.baselines import HOSTS, Ranks, naive_plans, next_fit, peer_plans
from megapack.plan import Plan

pytestmark = pytest.mark.unit

COST = CostModel(fixed=4.0, per_token=1.0, per_token_sq=1e-3)
RNG = np.random.default_rng(3)
LENGTHS = RNG.integers(1, 400, 90)
PEERS = {name: way for _, ways in HOSTS.values() for name, way in ways.items()}
# Whose rows may exceed the budget.
SOFT = ("slime --balance-by-flops", "verl")


def make_plan(layout: Layout, **settings: int) -> Plan:
    settings = settings or {"max_tokens_per_gpu": 512}
    return build_dp_schedule(LENGTHS, layout=layout, num_steps=2, cost=COST, **settings)  # type: ignore[arg-type]


def test_next_fit_by_hand() -> None:
    sizes = np.array([3, 4, 5, 1, 9, 2, 2])
    work = sizes.astype(float)
    # Rows of 3+4, 5+1, 9 and 2+2 tokens. G=3 needs six: the last rows with two samples are halved.
    assert next_fit(sizes, work, Layout(dp=2), 8) == [[[0, 1], [4]], [[2, 3], [5, 6]]]
    layout = Layout(dp=2, pp=3, vpp=2)
    assert next_fit(sizes, work, layout, 8) == [[[0, 1], [3], [5]], [[2], [4], [6]]]


# Rows that the originals' own code makes of ten samples, for DP alone and for G=3, which needs six.
PACKED: dict[str, tuple[Ranks, Ranks]] = {
    "slime --balance-data": (
        [[[2, 3, 7], [4, 5]], [[0, 1, 6], [8, 9]]],
        [[[0], [2], [1, 6]], [[4, 5], [8, 9], [3, 7]]],
    ),
    "slime --balance-by-flops": (
        [[[0], [4, 6, 7, 8, 9]], [[1, 2, 3], [5]]],
        [[[0], [8, 7, 6], [9, 4]], [[2], [5], [3, 1]]],
    ),
    "NeMo-RL": (
        [[[0, 3], [2, 8]], [[5, 9], [4, 1, 7, 6]]],
        [[[0, 3], [2, 8], [6]], [[5, 9], [4, 1], [7]]],
    ),
    "verl": (
        [[[2, 3, 4], [5, 6]], [[0], [1, 7, 8, 9]]],
        [[[3, 4, 6], [5], [2]], [[8], [0], [1, 7, 9]]],
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_peers_pack_as_the_originals_do(name: str) -> None:
    sizes = np.array([9, 2, 7, 3, 3, 8, 1, 2, 5, 4])
    work = (sizes + sizes**2).astype(float)
    layouts = (Layout(dp=2), Layout(dp=2, pp=3, vpp=2))
    assert tuple(PEERS[name](sizes, work, layout, 12) for layout in layouts) == PACKED[name]


LAYOUTS = [
    Layout(dp=3),
    Layout(dp=2, pp=4, vpp=2, microbatch_group_size=6),
    Layout(dp=2, cp=2, tp=2, sequence_parallel=True, fp8=True),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 3}])
def test_strategies_keep_samples_budget_and_legal_counts(
    layout: Layout, settings: dict[str, int]
) -> None:
    plan = make_plan(layout, **settings)
    found = naive_plans(plan, LENGTHS)
    assert list(found) == ["next-fit", "padded", "one sample"]
    for name, packed in found.items():
        for step, ours in zip(packed.steps, plan.steps, strict=True):
            assert step.kept_samples == ours.kept_samples
            assert len(step.ranks) == layout.dp
            assert layout.is_legal_count(int(step.num_microbatches or 0))
            assert {len(rank) for rank in step.ranks} == {step.num_microbatches}
            for mb in (mb for rank in step.ranks for mb in rank if mb.samples):
                longest = max(layout.aligned_sample_tokens(int(LENGTHS[i])) for i in mb.samples)
                taken = [int(LENGTHS[i]) for i in mb.samples]
                if name == "padded":
                    taken = [longest] * len(taken)
                assert mb.row_tokens == layout.padded_tokens(taken)
                assert settings or mb.row_tokens <= 512 * layout.cp
                assert len(mb.samples) <= {"one sample": 1}.get(name, 90)


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(dp=60)])
@pytest.mark.parametrize("name", PEERS)
def test_peers_keep_samples_budgets_and_legal_counts(layout: Layout, name: str) -> None:
    plan = make_plan(layout)
    found = peer_plans(plan, LENGTHS, COST, PEERS[name])
    # A row of the longest sample, 389 tokens, is padded to 448, of which a CP rank has 224.
    assert list(found) == baselines.budgets(512, 224 if layout.cp == 2 else 389)
    for tokens, packed in found.items():
        for step, ours in zip(packed.steps, plan.steps, strict=True):
            assert step.kept_samples == ours.kept_samples
            assert layout.is_legal_count(int(step.num_microbatches or 0))
            assert {len(rank) for rank in step.ranks} == {step.num_microbatches}
            longest = max(mb.padded_tokens for mb in step.microbatches)
            assert name in SOFT or longest <= tokens * layout.cp


def test_next_fit_under_a_plans_settings_is_a_plan() -> None:
    plan = make_plan(Layout(dp=2, pp=2, vpp=2))
    check_plan(naive_plans(plan, LENGTHS)["next-fit"], LENGTHS)


def test_budgets_fall_to_a_quarter_or_to_the_longest_sample() -> None:
    assert doctest.testmod(baselines).failed == 0
    assert baselines.budgets(16384, 16000)[-1] == 16000
    # A sample over the budget is in a row of its own under any.
    assert baselines.budgets(16384, 20000) == [16384]
    assert baselines.budgets(2, 1) == [2, 1]


def test_peers_need_a_budget() -> None:
    plan = make_plan(Layout(), micro_batch_size=3)
    with pytest.raises(ConfigError, match="set max_tokens_per_gpu"):
        peer_plans(plan, LENGTHS, COST, next_fit)
