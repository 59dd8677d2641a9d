from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.hosts import miles
from tests.hosts.rollouts import check_schedule, make_args, make_config, rollouts_of, rows_of

pytestmark = pytest.mark.hosts


def test_a_partial_step_is_optional() -> None:
    """5 rollouts in steps of 2; None stands for no VPP."""
    ids = [0, 0, 1, 2, 2, 3, 4, 4]
    config = make_config(vpp=None, group=None)
    args = make_args(max_tokens_per_gpu=12)
    for partial, kept in ((False, [2, 2]), (True, [2, 2, 1])):
        args.allow_partial_train_step = partial
        schedule = miles.build_dp_schedule(
            args, config, [3] * 8, global_batch_size=2, rollout_indices=ids
        )
        check_schedule(schedule, [3] * 8, ids, config, global_batch_size=2, max_tokens_per_gpu=12)
        assert schedule[3] == kept
        assert schedule[2] == [1] * len(kept)


@pytest.mark.parametrize(
    ("sizes", "config"),
    [([2, 2, 1], make_config(dp=2)), ([2, 2, 2], make_config(dp=1, vpp=2, group=4))],
    ids=["fewer samples than ranks", "fewer than the group"],
)
def test_a_partial_step_with_too_few_samples_is_left_out(
    sizes: list[int], config: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megapack.hosts")
    args = make_args(max_tokens_per_gpu=12, allow_partial_train_step=True)
    schedule = miles.build_dp_schedule(
        args, config, [3] * sum(sizes), global_batch_size=2, rollout_indices=rollouts_of(sizes)
    )
    assert schedule[3] == [2]
    assert f"partial step skipped: its {sizes[2]} samples" in caplog.text


@pytest.mark.parametrize("sizes", [[1] * 12, [2, 1, 3, 2, 1, 3]])
def test_a_batch_of_several_adapters_is_one_step_of_rows_by_slot(sizes: list[int]) -> None:
    """miles' layers read the slots of a row ascending. The batch's size counts samples."""
    slots = [2, 0, 1] * 4
    data = {"tokens": [[1] * n for n in range(3, 15)], "adapter_slots": slots}
    args = make_args(max_tokens_per_gpu=30, multi_lora=True)
    lengths = [len(ids) for ids in data["tokens"]]
    schedule = miles.build_dp_schedule(
        args,
        make_config(dp=2),
        lengths,
        global_batch_size=len(lengths),
        rollout_indices=rollouts_of(sizes),
    )
    rows = [row for rank in rows_of(schedule) for row in rank]
    assert sorted(i for row in rows for i in row) == [*range(12)]
    assert all([slots[i] for i in row] == sorted(slots[i] for i in row) for row in rows)
    assert any(len({slots[i] for i in row}) > 1 for row in rows)
    assert len(schedule[2]) == 1


def test_no_sample_of_an_adapter_is_dropped() -> None:
    """miles divides the gradient of each adapter by the samples that it had before."""
    slots = [0, 1, 2] * 4
    args = make_args(max_tokens_per_gpu=10, multi_lora=True, pipeline_model_parallel_size=2)
    config = {**make_config(dp=2), "vpp_size": 2, "microbatch_group_size_per_vp_stage": 4}
    data = {"tokens": [[1] * 10 for _ in slots], "adapter_slots": slots}
    lengths = [len(ids) for ids in data["tokens"]]
    with pytest.raises(ValueError, match="cannot align micro-batches to align_to=8"):
        miles.build_dp_schedule(
            args, config, lengths, global_batch_size=12, rollout_indices=rollouts_of([1] * 12)
        )


def test_whether_several_adapters_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"adapter_slots": [0, 1], "rollout_ids": [0, 0]}
    asked = []

    def own(args: Any, data: Any, config: Any) -> bool:
        asked.append((args.multi_lora, data["dynamic_global_batch_size"]))
        return True

    monkeypatch.setattr(miles.patching, "original", lambda name: own)
    args = make_args(multi_lora=True)
    assert miles.can_schedule_on_rollout_side(args, data, {})
    assert asked == [(False, 1)]
    assert args.multi_lora
    options = miles.rollout_schedule.OPTIONS
    shares = dataclasses.replace(options.current, share_prefixes=True)
    monkeypatch.setattr(options, "current", shares)
    with pytest.raises(ValueError, match="with multi-LoRA: its layers"):
        miles.can_schedule_on_rollout_side(args, data, {})


@pytest.mark.parametrize("key", ["adapter_slots", "multimodal_train_inputs"])
def test_static_batches_are_as_without_the_patch(originals: dict[str, Any], key: str) -> None:
    """miles sorts static batches by adapter only where it does not plan them ahead."""
    data = {key: [None, None], "rollout_ids": [0, 1]}
    asked = []

    def own(*given: Any) -> bool:
        asked.append(given)
        return False

    originals["miles.ray.rollout.train_data_conversion.can_schedule_on_rollout_side"] = own
    args = make_args(multi_lora=True, use_dynamic_batch_size=False)
    assert not miles.can_schedule_on_rollout_side(args, data, {})
    assert asked == [(args, data, {})]


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=14),
    data=st.data(),
    dp=st.sampled_from([1, 2]),
    by_flops=st.booleans(),
)
def test_schedules_with_a_partial_step(
    sizes: list[int], data: st.DataObject, dp: int, by_flops: bool
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=sum(sizes), max_size=sum(sizes)))
    size = data.draw(st.integers(1, len(sizes)))
    ids, config = rollouts_of(sizes), make_config(dp=dp, vpp=None, group=None)
    args = make_args(
        max_tokens_per_gpu=40, allow_partial_train_step=True, balance_by_flops=by_flops
    )
    try:
        schedule = miles.build_dp_schedule(
            args, config, lengths, global_batch_size=size, rollout_indices=ids
        )
    except ValueError:
        assert dp > 1
        return
    check_schedule(schedule, lengths, ids, config, global_batch_size=size, max_tokens_per_gpu=40)
    if dp == 1:
        assert sum(schedule[3]) == len(sizes)
        assert sum(len(row) for rank in rows_of(schedule) for row in rank) == len(lengths)
