"""What each freedom of a plan gains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapack import (
    CostModel,
    Layout,
    Plan,
    PlanError,
    Policy,
    SharedPrefixes,
    build_dp_schedule,
    simulate,
)
from megapack.plan import Gain

pytestmark = pytest.mark.unit

COST = CostModel(fixed=10.0, per_token=1.0, per_token_sq=1e-3)
# One sample is as long as 40 others.
LENGTHS = [4000, *([100, 60, 140] * 8)]
LAYOUT = Layout(dp=2, pp=2)


def plan_of(layout: Layout = LAYOUT, budget: int = 4000, **policy: object) -> Plan:
    return build_dp_schedule(
        LENGTHS,
        layout=layout,
        max_tokens_per_gpu=budget,
        cost=COST,
        policy=Policy(search=32, **policy),  # type: ignore[arg-type]
    )


def gains_of(plan: Plan) -> dict[str, Gain]:
    return {gain.setting: gain for gain in plan.explain().gains}


def seconds_of(plan: Plan) -> float:
    return simulate(plan.steps[0], layout=plan.layout, cost=COST).makespan


@pytest.mark.parametrize(
    ("setting", "value"), [("split_samples", "auto"), ("context_parallel", "dynamic")]
)
def test_a_long_sample_gains_by_pieces_or_width_on_or_off(setting: str, value: str) -> None:
    off, on = plan_of(), plan_of(**{setting: value})
    would, did = gains_of(off)[setting], gains_of(on)[setting]
    assert (would.is_on, did.is_on) == (False, True)
    times = (seconds_of(on), seconds_of(off))
    assert (would.seconds_with, would.seconds_without) == times
    assert (did.seconds_with, did.seconds_without) == times
    assert did.gain == would.gain == 1 - times[0] / times[1]
    assert did.gain > 0.1
    assert (bool(did.used), would.used) == (True, "")


def test_a_refused_combination_has_its_reason() -> None:
    gain = gains_of(plan_of(row_shape="uniform"))["split_samples"]
    assert (gain.seconds_with, gain.gain) == (None, None)
    assert gain.refusal.endswith("pieces are cut to equal work and so differ in length")


def test_a_plan_with_larger_rows_or_other_samples_is_no_comparison() -> None:
    gain = gains_of(plan_of(budget=2500, split_samples="auto"))["split_samples"]
    assert gain.seconds_without is None
    assert gain.refusal == "a row would hold 4000 padded tokens, over the budget of 2500"
    # Two pairs fit into a row if each shares its prompt; else three pairs cannot fill four rows.
    pairs = [0, 0, 1, 1, 2, 2]
    plan = build_dp_schedule(
        [100] * 6,
        layout=Layout(dp=2),
        max_tokens_per_gpu=222,
        rollout_ids=pairs,
        colocate_ids=pairs,
        prefixes=SharedPrefixes.from_groups(pairs, [90] * 6),
        policy=Policy(unreachable="drop"),
    )
    refusal = gains_of(plan)["share_prefixes"].refusal
    assert refusal == "it would train on 4 samples in place of 6"


def test_prefixes_gain_if_they_are_given() -> None:
    assert gains_of(plan_of())["share_prefixes"].refusal == "no prefixes are given"
    # The last token of a prompt stays with each sample: 7 * 89 are saved.
    shared = SharedPrefixes.from_groups([0] * 8, [90] * 8)
    plan = build_dp_schedule(
        [100] * 8, layout=Layout(), max_tokens_per_gpu=800, cost=COST, prefixes=shared
    )
    gain = gains_of(plan)["share_prefixes"]
    assert gain.used.startswith("623 of 800 tokens")
    assert (gain.gain or 0) > 0.5


def test_text_and_payload_agree() -> None:
    explanation = plan_of(split_samples="auto").explain()
    lines = str(explanation).splitlines()
    gains = []
    for row in explanation.to_payload():
        setting = f"{row['setting']}={row['on']}"
        (line,) = (line for line in lines if setting in line)
        if row["refusal"]:
            assert line == f"not possible: {setting}: {row['refusal']}"
        elif abs(row["gain"]) < 0.0005:
            assert line.startswith("no difference: ")
        else:
            verb = ("would save", "saves")[row["is_on"]] if row["gain"] > 0 else "cost"
            assert f" {abs(row['gain']):.1%} of the time" in line
            assert verb in line
            assert f"{row['live_without']:.0f} -> {row['live_with']:.0f}" in line
            assert row["used"] in line
            gains.append((lines.index(line), abs(row["gain"])))
    # The largest change first, and none of 0.0 %.
    assert [gain for _, gain in sorted(gains)] == sorted((g for _, g in gains), reverse=True)
    assert gains
    assert " 0.0% of the time" not in str(explanation)


def test_a_plan_that_was_read_is_equal_and_cannot_be_explained() -> None:
    plan = plan_of()
    read = Plan.from_json(plan.to_json())
    assert read == plan == replace(plan)
    with pytest.raises(PlanError, match="call explain"):
        read.explain()
