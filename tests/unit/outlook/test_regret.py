"""What another cost model's plan would have cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megapack import CostModel, Layout, Plan, Policy, build_dp_schedule, simulate
from megapack.errors import ConfigError, PlanError
from megapack.outlook.regret import replanned_seconds
from megapack.prefixes import SharedPrefixes

pytestmark = pytest.mark.unit

LAYOUT = Layout(dp=2, pp=2)
TRUE = CostModel(per_token=1e-6, per_token_sq=2e-9)
# A plan by tokens puts the long samples' squares where they hurt.
WRONG = CostModel(per_token=1e-6)
LENGTHS = np.random.default_rng(0).integers(16, 1900, 48)


def make_plan(cost: CostModel, **settings: object) -> Plan:
    return build_dp_schedule(
        LENGTHS,
        layout=LAYOUT,
        max_tokens_per_gpu=2048,
        cost=cost,
        **{"num_steps": 2, **settings},  # type: ignore[arg-type]
    )


def true_seconds(plan: Plan) -> float:
    return sum(simulate(step, layout=LAYOUT, cost=TRUE).makespan for step in plan.steps)


def test_each_models_plan_is_simulated_with_the_true_one() -> None:
    plan = make_plan(TRUE)
    wrong, true = replanned_seconds(plan, LENGTHS, [WRONG, TRUE], TRUE)
    assert true == pytest.approx(true_seconds(plan))
    assert wrong == pytest.approx(true_seconds(make_plan(WRONG)))
    assert wrong > true


def test_steps_keep_their_samples_and_colocated_ones_their_row() -> None:
    pairs = np.repeat(np.arange(24), 2).tolist()
    plan = make_plan(TRUE, rollout_ids=pairs, colocate_ids=pairs, policy=Policy(oversize="alone"))
    assert replanned_seconds(plan, LENGTHS, [TRUE], TRUE) == [pytest.approx(true_seconds(plan))]
    # Without the pairs the same samples are faster.
    apart = replace(plan, colocate_ids=None)
    assert replanned_seconds(apart, LENGTHS, [TRUE], TRUE) < [true_seconds(plan)]


def test_the_plans_warnings_are_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [3000, *LENGTHS]
    plan = build_dp_schedule(lengths, layout=LAYOUT, max_tokens_per_gpu=2048)
    assert "1 sample(s) over the budget" in caplog.text
    caplog.clear()
    replanned_seconds(plan, lengths, [WRONG, TRUE], TRUE)
    assert caplog.text == ""


def test_prefixes_are_left_out() -> None:
    prefixes = SharedPrefixes(order=(0, 1, 2, 3), common=(0, 9, 9, 9))
    plan = make_plan(TRUE, prefixes=prefixes)
    assert replanned_seconds(plan, LENGTHS, [TRUE], TRUE) == [
        pytest.approx(true_seconds(make_plan(TRUE)))
    ]


def test_lengths_and_models_of_another_run_are_refused() -> None:
    plan = make_plan(TRUE)
    with pytest.raises(PlanError, match="47 lengths for a plan of 48 samples"):
        replanned_seconds(plan, LENGTHS[1:], [TRUE], TRUE)
    with pytest.raises(ConfigError, match="4 stage_weights for pp"):
        replanned_seconds(plan, LENGTHS, [replace(TRUE, stage_weights=(1.0,) * 4)], TRUE)
