from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack import (
    DataError,
    Layout,
    Plan,
    PlanError,
    Policy,
    build_dp_schedule,
    check_plan,
)

pytestmark = pytest.mark.unit

INTERLEAVED = Layout(dp=2, pp=4, vpp=2, microbatch_group_size=8)


def planned(lengths: list[int], **arguments: Any) -> Plan:
    plan = build_dp_schedule(lengths, **arguments)
    check_plan(plan, lengths)
    return plan


def rollouts(sizes: list[int]) -> list[int]:
    return [rollout for rollout, size in enumerate(sizes) for _ in range(size)]


def num_padding(plan: Plan) -> int:
    return sum(not mb.samples for step in plan.steps for rank in step.ranks for mb in rank)


# Inputs that other schedulers plan wrong.


def test_514_singletons_at_dp4() -> None:
    lengths = [10] * 514
    plan = planned(lengths, layout=Layout(dp=4), max_tokens_per_gpu=10)
    assert plan.steps[0].num_microbatches == 129
    assert num_padding(plan) == 2
    dropped = planned(
        lengths, layout=Layout(dp=4), max_tokens_per_gpu=10, policy=Policy(unreachable="drop")
    )
    assert dropped.steps[0].num_microbatches == 128
    assert dropped.steps[0].dropped_rollouts == (512, 513)


@pytest.mark.parametrize(("sizes", "kept"), [([3, 2, 3, 1, 2], 3), ([2, 1, 1, 3], 3)])
def test_ragged_rollouts_at_dp4(
    sizes: list[int], kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = [8] * sum(sizes)
    arguments: dict[str, Any] = {
        "layout": Layout(dp=4),
        "max_tokens_per_gpu": 8,
        "rollout_ids": rollouts(sizes),
    }
    assert num_padding(planned(lengths, **arguments)) == -sum(sizes) % 4
    with caplog.at_level(logging.WARNING, logger="megapack"):
        step = planned(lengths, policy=Policy(unreachable="drop"), **arguments).steps[0]
    assert step.kept_rollouts == tuple(range(kept))
    assert step.dropped_rollouts == tuple(range(kept, len(sizes)))
    assert step.kept_samples == tuple(range(sum(sizes[:kept])))
    message = f"step 0: dropped {len(sizes) - kept} trailing rollout(s) ({kept} kept, "
    assert message + f"{sum(sizes[:kept])} samples)" in caplog.text


def test_no_prefix_of_the_rollouts_fits_dp4() -> None:
    sizes = [1, 1, 4, 1, 3, 1]
    arguments: dict[str, Any] = {"layout": Layout(dp=4), "rollout_ids": rollouts(sizes)}
    policy = Policy(unreachable="drop")
    with pytest.raises(PlanError, match=r"step 0: 11 samples .* no prefix .*align count 4"):
        planned([8] * 11, max_tokens_per_gpu=8, policy=policy, **arguments)
    # With room for two samples in a row none has to be dropped.
    plan = planned([8] * 11, max_tokens_per_gpu=16, policy=policy, **arguments)
    assert plan.steps[0].kept_samples == tuple(range(11))


def test_12_samples_at_dp2_and_groups_of_8() -> None:
    plan = planned([5] * 12, layout=INTERLEAVED, max_tokens_per_gpu=100)
    assert plan.steps[0].num_microbatches == 8
    assert num_padding(plan) == 4
    for policy in (Policy(unreachable="error"), Policy(unreachable="drop")):
        with pytest.raises(PlanError, match=r"12 samples cannot fill 16 .*set") as caught:
            planned([5] * 12, layout=INTERLEAVED, max_tokens_per_gpu=100, policy=policy)
        assert "step 0" in str(caught.value)
    with pytest.raises(PlanError, match="align count 16"):
        planned(
            [5] * 12, layout=INTERLEAVED, max_tokens_per_gpu=99, policy=Policy(unreachable="drop")
        )


def test_17_token_samples_at_cp8_count_with_their_alignment() -> None:
    plan = planned([17] * 64, layout=Layout(cp=8), max_tokens_per_gpu=16)
    assert max(mb.row_tokens for mb in plan.steps[0].ranks[0]) == 128
    assert plan.steps[0].num_microbatches == 16


def test_samples_of_interleaved_rollout_ids_stay_together() -> None:
    ids = ["a", "b", "a", "b"]
    plan = planned(
        [4, 5, 6, 7],
        layout=Layout(),
        max_tokens_per_gpu=100,
        rollout_ids=ids,
        global_batch_size=1,
    )
    assert [step.kept_samples for step in plan.steps] == [(0, 2), (1, 3)]
    assert [step.kept_rollouts for step in plan.steps] == [("a",), ("b",)]


def test_length_and_budget_of_1000_with_alignment_64() -> None:
    layout = Layout(cp=2, tp=32, sequence_parallel=True)
    assert layout.row_alignment == 64
    plan = planned([1000, 3], layout=layout, max_tokens_per_gpu=500)
    assert sorted(mb.row_tokens for mb in plan.steps[0].ranks[0]) == [64, 1024]
    with pytest.raises(PlanError, match="sample 0: 1000 tokens, 1024 padded"):
        planned([1000, 3], layout=layout, max_tokens_per_gpu=500, policy=Policy(oversize="error"))


def test_44_rows_in_16_steps_stay_16_steps() -> None:
    for split in ("contiguous", "balanced"):
        plan = planned(
            [10] * 44,
            layout=Layout(),
            max_tokens_per_gpu=10,
            num_steps=16,
            policy=Policy(step_split=split),
        )
        assert len(plan.steps) == 16
        assert {step.num_microbatches for step in plan.steps} == {2, 3}


@pytest.mark.parametrize("row_shape", ["planned", "uniform"])
def test_an_oversize_first_sample_adds_no_padding(
    row_shape: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="megapack"):
        plan = planned(
            [99, 5, 5, 5],
            layout=Layout(dp=2),
            max_tokens_per_gpu=20,
            policy=Policy(row_shape=row_shape),
        )
    assert num_padding(plan) == 0
    assert [(0,)] in [
        [mb.samples for mb in rank if 0 in mb.samples] for rank in plan.steps[0].ranks
    ]
    assert caplog.text.count("alone in its row") == 1


# Counts and shapes.


def test_padding_is_one_aligned_unit_or_the_uniform_row() -> None:
    layout = Layout(dp=4, cp=2)
    by_shape = {
        shape: planned(
            [50], layout=layout, max_tokens_per_gpu=60, policy=Policy(row_shape=shape)
        ).steps[0]
        for shape in ("planned", "uniform")
    }
    rows = {
        shape: sorted(mb.row_tokens for rank in step.ranks for mb in rank)
        for shape, step in by_shape.items()
    }
    assert rows == {"planned": [4, 4, 4, 52], "uniform": [52] * 4}


def test_count_rules_multiple_and_legal() -> None:
    counts = {
        rule: planned(
            [10] * 18,
            layout=INTERLEAVED,
            max_tokens_per_gpu=10,
            policy=Policy(count_rule=rule),
        )
        .steps[0]
        .num_microbatches
        for rule in ("legal", "multiple")
    }
    assert counts == {"legal": 12, "multiple": 16}


def test_count_based_plans_keep_the_input_order() -> None:
    plan = planned([5, 6, 7, 8, 9], layout=Layout(), micro_batch_size=2)
    assert sorted(mb.samples for mb in plan.steps[0].ranks[0]) == [(0, 1), (2, 3), (4,)]
    plan = planned([5, 6, 7, 8, 9], layout=Layout(dp=4), micro_batch_size=2)
    assert num_padding(plan) == 0
    assert plan.max_tokens_per_gpu is None


def test_the_last_step_gets_the_rest() -> None:
    for split in ("contiguous", "balanced"):
        plan = planned(
            [5] * 10,
            layout=Layout(),
            max_tokens_per_gpu=100,
            global_batch_size=4,
            policy=Policy(step_split=split),
        )
        sizes = [len(step.kept_rollouts) for step in plan.steps]
        assert sum(sizes) == 10
        assert max(sizes) == 4
        assert split == "balanced" or sizes == [4, 4, 2]


def test_steps_of_about_equal_tokens() -> None:
    lengths = [100, 1, 1, 1, 1, 96, 50, 50]
    by_split = {
        split: planned(
            lengths,
            layout=Layout(),
            max_tokens_per_gpu=200,
            num_steps=3,
            policy=Policy(step_split=split),
        )
        for split in ("contiguous", "balanced")
    }
    tokens = {
        split: [sum(lengths[i] for i in step.kept_samples) for step in plan.steps]
        for split, plan in by_split.items()
    }
    assert tokens == {"contiguous": [100, 100, 100], "balanced": [100, 100, 100]}


# Refusals.


def test_per_rank_is_another_name_of_legal() -> None:
    assert Policy(count_rule="per_rank") == Policy()


# Determinism.


def test_the_type_of_the_input_does_not_matter() -> None:
    lengths = np.random.default_rng(0).integers(1, 900, 200)
    plans = [
        build_dp_schedule(kind, layout=Layout(dp=2, pp=2), max_tokens_per_gpu=2000)
        for kind in (lengths, lengths.tolist(), tuple(lengths), lengths.astype(np.uint16))
    ]
    assert len({plan.digest() for plan in plans}) == 1
    ids = np.arange(200) // 2
    with_ids = [
        build_dp_schedule(lengths, layout=Layout(), max_tokens_per_gpu=2000, rollout_ids=kind)
        for kind in (ids, ids.tolist())
    ]
    assert with_ids[0].to_json() == with_ids[1].to_json()


def test_planning_needs_no_torch(repo_root: Path) -> None:
    code = (
        "import sys, megapack\n"
        "megapack.build_dp_schedule([5] * 9, layout=megapack.Layout(), max_tokens_per_gpu=9)\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(repo_root)}, check=True, timeout=120
    )


@pytest.mark.parametrize("kind", ["adapter_ids", "rollout_ids", "colocate_ids"])
@pytest.mark.parametrize(
    "ids", [{"a", "b", "c"}, frozenset("abc"), "abc", b"abc", {1: 0, 2: 0, 3: 0}, np.array(3)]
)
def test_ids_without_an_order_are_refused(kind: str, ids: object) -> None:
    """Sets have another order in another process."""
    with pytest.raises(DataError, match=f"{kind} are .*; give one id per sample"):
        build_dp_schedule([5] * 3, layout=Layout(), max_tokens_per_gpu=16, **{kind: ids})
