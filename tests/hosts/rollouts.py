"""Arguments of slime and miles, and the checks that any of their schedules must pass."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]


def make_args(**changes: Any) -> SimpleNamespace:
    """Dynamic batches of a tiny dense model."""
    fields: dict[str, Any] = {
        "micro_batch_size": 1,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": None,
        "balance_data": False,
        "balance_by_flops": False,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_query_groups": 2,
        "vocab_size": 32,
        "ffn_hidden_size": 64,
        "num_experts": None,
        "num_layers": 2,
        "kv_channels": 8,
    }
    return SimpleNamespace(**{**fields, **changes})


def make_config(
    dp: int = 1, cp: int = 1, vpp: int | None = 1, group: int | None = 1
) -> dict[str, Any]:
    return {
        "dp_size": dp,
        "cp_size": cp,
        "vpp_size": vpp,
        "microbatch_group_size_per_vp_stage": group,
    }


def rollouts_of(sizes: Sequence[int]) -> list[int]:
    """The rollout of each sample, for rollouts with these numbers of samples."""
    return [rollout for rollout, size in enumerate(sizes) for _ in range(size)]


def rows_of(schedule: Schedule) -> list[list[list[int]]]:
    """The micro-batches of each rank, as indices into all samples."""
    partitions, micro_batch_indices, _, _ = schedule
    return [
        [[partition[i] for i in mb] for mb in rank]
        for partition, rank in zip(partitions, micro_batch_indices, strict=True)
    ]


def check_schedule(
    schedule: Schedule,
    lengths: Sequence[int],
    rollout_ids: Sequence[int],
    config: dict[str, Any],
    *,
    global_batch_size: int,
    max_tokens_per_gpu: int | None = None,
) -> None:
    """Check the host's contract, and two more: alignment counts, and no micro-batch is empty."""
    partitions, micro_batch_indices, num_microbatches, kept = schedule
    dp = config["dp_size"]
    cp = config["cp_size"]
    multiple = config["microbatch_group_size_per_vp_stage"] if (config["vpp_size"] or 1) > 1 else 1
    assert len(partitions) == len(micro_batch_indices) == dp
    assert len(num_microbatches) == len(kept)
    assert all(type(count) is int and count % multiple == 0 for count in num_microbatches)
    for partition, rank in zip(partitions, micro_batch_indices, strict=True):
        assert [i for mb in rank for i in mb] == list(range(len(partition)))
        assert len(rank) == sum(num_microbatches)
        assert all(rank)
    rows = rows_of(schedule)
    if max_tokens_per_gpu is not None:
        unit = 2 * cp if cp > 1 else 1
        for row in (row for rank in rows for row in rank):
            padded = sum(-(-lengths[i] // unit) * unit for i in row)
            assert padded <= max_tokens_per_gpu * cp or len(row) == 1
    names = list(dict.fromkeys(rollout_ids))
    start = 0
    for step, count in enumerate(num_microbatches):
        found = sorted(i for rank in rows for row in rank[start : start + count] for i in row)
        start += count
        first = step * global_batch_size
        wanted = set(names[first : first + kept[step]])
        assert found == [i for i, rollout in enumerate(rollout_ids) if rollout in wanted]


def first_fit_count(lengths: Sequence[int], capacity: int) -> int:
    bins: list[int] = []
    for length in lengths:
        number = next((k for k, used in enumerate(bins) if used + length <= capacity), None)
        if number is None:
            bins.append(length)
        else:
            bins[number] += length
    return len(bins)


def first_fit_kept(lengths: Sequence[int], sizes: Sequence[int], capacity: int, align: int) -> int:
    """Rollouts that are kept when trailing ones are dropped until the samples can fill first-fit's
    number of bins, rounded up to a multiple of `align`; 0 if they never can."""
    for kept in range(len(sizes), 0, -1):
        num_samples = sum(sizes[:kept])
        bins = first_fit_count(lengths[:num_samples], capacity)
        if -(-bins // align) * align <= num_samples:
            return kept
    return 0
