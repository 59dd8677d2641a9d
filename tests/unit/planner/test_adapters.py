"""Samples of several adapters: side by side in rows, or in rows of their own."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from megapack import (
    ConfigError,
    DataError,
    Layout,
    Plan,
    PlanError,
    Policy,
    SharedPrefixes,
    build_dp_schedule,
    check_plan,
    simulate,
)
from megapack.plan.show import format_grid

ONE = Policy(adapters="one")


def drawn(seed: int, num_adapters: int, size: int = 96) -> tuple[list[int], list[str | int]]:
    """Lengths, and ids of both types."""
    rng = random.Random(seed)
    names: list[str | int] = ["b", 7, "a", 3, -1, "7", 12, 0]
    lengths = [min(4000, int(rng.lognormvariate(6, 1)) + 1) for _ in range(size)]
    return lengths, [rng.choice(names[:num_adapters]) for _ in range(size)]


def num_mixed(plan: Plan) -> int:
    assert plan.adapter_ids is not None
    rows = [{plan.adapter_ids[i] for i in mb.samples} for mb in plan.microbatches]
    return sum(len(row) > 1 for row in rows)


def seconds(plan: Plan) -> float:
    return sum(simulate(step, layout=plan.layout).makespan for step in plan.steps)


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(dp=2, pp=4), Layout(dp=2, pp=2, vpp=2)])
@pytest.mark.parametrize("num_adapters", [2, 8])
def test_rows_of_several_adapters_cost_nothing_and_rows_of_one_little(
    layout: Layout, num_adapters: int
) -> None:
    lengths, ids = drawn(num_adapters, num_adapters)
    options = {"layout": layout, "max_tokens_per_gpu": 8192}
    plain = build_dp_schedule(lengths, **options)
    group = build_dp_schedule(lengths, **options, adapter_ids=ids)
    one = build_dp_schedule(lengths, **options, adapter_ids=ids, policy=ONE)
    for plan in (group, one):
        check_plan(plan, lengths)
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.digest() != plain.digest()
    costs_nothing = seconds(one) <= 1.002 * seconds(plain)
    assert group.steps == one.steps if costs_nothing else seconds(group) == seconds(plain)
    assert (num_mixed(group) == 0) == costs_nothing
    assert num_mixed(one) == 0
    assert seconds(one) < 1.06 * seconds(plain)


def test_rows_have_one_adapter_where_that_costs_nothing() -> None:
    lengths = [512] * 16
    plan = build_dp_schedule(
        lengths, layout=Layout(dp=2), max_tokens_per_gpu=2048, adapter_ids=[0, 1] * 8
    )
    check_plan(plan, lengths)
    assert (num_mixed(plan), plan.steps[0].num_microbatches) == (0, 2)
    assert plan.policy.adapters == "group"


def test_no_rollout_is_dropped_for_rows_of_one_adapter(caplog: pytest.LogCaptureFixture) -> None:
    """5 samples fill 4 rows; one a row they would need 8, and be 3 too few."""
    lengths = [512] * 5
    options = {"layout": Layout(dp=2, pp=2, vpp=2), "max_tokens_per_gpu": 1024}
    plans = [
        build_dp_schedule(
            lengths,
            **options,
            adapter_ids=range(5),
            policy=Policy(unreachable="drop", adapters=adapters),
        )
        for adapters in ("group", "one")
    ]
    assert [plan.counts.num_dropped_rollouts for plan in plans] == [0, 1]
    assert num_mixed(plans[0]) > 0
    # Of the plan that was only tried nothing is said.
    assert caplog.text.count("dropped 1 trailing rollout") == 1


def test_integers_come_before_strings_and_rows_follow_their_order() -> None:
    plan = build_dp_schedule(
        [5] * 6, layout=Layout(), micro_batch_size=6, adapter_ids=["b", 10, "a", 9, "10", 9]
    )
    assert [mb.samples for mb in plan.microbatches] == [(3, 5, 1, 4, 2, 0)]
    shown = format_grid(plan, rank=0)
    assert "samples 3,5,1,4,2,0; adapters [9, 10, '10', 'a', 'b']" in shown


def test_rows_of_a_number_of_samples_have_one_adapter() -> None:
    ids = [0, 1, 0, 1, 1]
    plan = build_dp_schedule(
        [5] * 5, layout=Layout(dp=2), micro_batch_size=2, adapter_ids=ids, policy=ONE
    )
    check_plan(plan, [5] * 5)
    assert num_mixed(plan) == 0
    assert sum(bool(mb.samples) for mb in plan.microbatches) >= 3


def test_samples_of_several_adapters_share_no_prefix() -> None:
    tokens = [[*range(1, 60), 100 + i] for i in range(8)]
    lengths = [60] * 8
    ids = [i % 2 for i in range(8)]
    prefixes = SharedPrefixes.from_samples(tokens)
    options = {"layout": Layout(), "max_tokens_per_gpu": 480, "prefixes": prefixes}
    together = build_dp_schedule(lengths, **options)
    apart = build_dp_schedule(lengths, **options, adapter_ids=ids)
    check_plan(apart, lengths)
    assert together.counts.shared_tokens == 7 * 58
    assert apart.counts.shared_tokens == 6 * 58
    assert apart.prefixes is not None
    broken = dataclasses.replace(apart, prefixes=prefixes)
    with pytest.raises(PlanError, match="invariant"):
        check_plan(broken, lengths)


def test_prefixes_apart_are_those_of_each_group_alone() -> None:
    rng = random.Random(3)
    samples = [[rng.randrange(2) for _ in range(rng.randint(1, 9))] for _ in range(40)]
    groups = np.array([rng.randrange(3) for _ in samples])
    apart = SharedPrefixes.from_samples(samples).apart(groups)
    for group in range(3):
        own = [i for i in range(40) if groups[i] == group]
        alone = SharedPrefixes.from_samples([samples[i] for i in own])
        chosen = [k for k, i in enumerate(apart.order) if groups[i] == group]
        assert [samples[apart.order[k]] for k in chosen] == [samples[own[i]] for i in alone.order]
        assert tuple(apart.common[k] for k in chosen) == alone.common


def test_a_piece_stands_before_the_adapters_of_its_row() -> None:
    rng = random.Random(0)
    lengths = [rng.choice([4000, 5000, 6000]) for _ in range(2)]
    lengths += [rng.randint(20, 300) for _ in range(40)]
    ids = [1, 2, *(rng.randrange(3) for _ in range(40))]
    plan = build_dp_schedule(
        lengths,
        layout=Layout(pp=4),
        max_tokens_per_gpu=2048,
        adapter_ids=ids,
        policy=Policy(split_samples="auto"),
    )
    check_plan(plan, lengths)
    rows = [[ids[i] for i in mb.samples] for mb in plan.microbatches if mb.pieces]
    assert any(len(set(row)) > 1 for row in rows)
    for row in rows:
        turned = [(adapter - row[0]) % 3 for adapter in row]
        assert turned == sorted(turned)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter_ids": [0]}, "1 adapter_ids for 3 samples"),
        ({"adapter_ids": [0, None, 1]}, "sample 1 has adapter id None"),
        (
            {"adapter_ids": [0, 1, 1], "colocate_ids": ["x", "x", "y"]},
            "samples 0 and 1 share the colocate id 'x' but not the adapter: 0 and 1",
        ),
        (
            {"policy": Policy(adapters="one", split_samples="auto")},
            "adapters='one' with split_samples='auto'",
        ),
        (
            {"policy": Policy(adapters="one", context_parallel="dynamic")},
            "adapters='one' with context_parallel='dynamic'",
        ),
        ({"policy": Policy(adapters="one", backward="split")}, "adapters='one' with backward"),
    ],
)
def test_what_contradicts_adapters_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        build_dp_schedule([5, 6, 7], layout=Layout(), max_tokens_per_gpu=64, **options)


def test_a_damaged_plan_is_shown_in_one_line_a_row() -> None:
    ids = ["a\nplan 000: forged", *map(str, range(98))]
    plan = build_dp_schedule([5] * 99, layout=Layout(), micro_batch_size=99, adapter_ids=ids)
    lines = format_grid(plan, rank=0).splitlines()
    assert len(lines) == 3
    assert len(lines[-1]) < 200
    few = dataclasses.replace(plan, adapter_ids=(7, 8))
    assert "adapters [8, 7]" in format_grid(few, rank=0)


def test_plans_with_wrong_adapters_are_refused() -> None:
    lengths = [5, 6, 7, 8]
    options = {"layout": Layout(), "max_tokens_per_gpu": 64, "adapter_ids": [0, 1, 0, 1]}
    plan = build_dp_schedule(lengths, **options)
    (mb,) = plan.microbatches
    assert mb.samples == (0, 2, 1, 3)
    step = plan.steps[0]

    def with_row(samples: tuple[int, ...], policy: Policy = plan.policy) -> Plan:
        row = dataclasses.replace(mb, samples=samples)
        steps = (dataclasses.replace(step, ranks=((row,),)),)
        return dataclasses.replace(plan, steps=steps, policy=policy)

    check_plan(with_row((1, 3, 0, 2)), lengths)
    for broken, message in (
        (with_row((0, 1, 2, 3)), "has adapters in turns: "),
        (with_row((0, 2, 1, 3), ONE), "has 2 adapters under adapters='one'"),
        (dataclasses.replace(plan, adapter_ids=(0, 1)), "2 adapter_ids for 4 samples"),
    ):
        with pytest.raises(PlanError, match=f"invariant 14 is broken: .*{message}"):
            check_plan(broken, lengths)
