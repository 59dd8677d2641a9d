"""slime: `slime.utils.dp_schedule` and the functions of `slime.utils.seqlen_balancing` it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megapack.hosts.shared.balancing import (
    expand_bins_by_splitting,
    first_fit_pack,
    get_seqlen_balanced_partitions,
)
from megapack.hosts.shared.flops import sample_flops
from megapack.hosts.shared.options import HostOptions
from megapack.hosts.shared.rollout_schedule import (
    RolloutOptions,
    Rollouts,
    Schedule,
    layout_of,
    plan_dynamic,
    plan_static,
)

__all__ = [
    "build_dp_schedule",
    "configure",
    "expand_bins_by_splitting",
    "first_fit_pack",
    "get_seqlen_balanced_partitions",
]

options = HostOptions(RolloutOptions())
configure = options.configure


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, Any],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[Any],
) -> Schedule:
    """slime's schedule of one rollout's samples.

    With `use_dynamic_batch_size` rows hold `max_tokens_per_gpu * cp_size` tokens, alignment
    counted; a sample over that is alone. A step that reaches no multiple of `dp_size * mb_group`
    drops whole trailing rollouts, with a warning. Ranks are balanced by FLOPs whatever the flags
    say; `balance_data` or `balance_by_flops` let the search take longer, and neither lets a row
    over the budget. Without dynamic batches, chunks of `micro_batch_size`; `balance_data` balances
    ranks by FLOPs, else chunks are dealt in turn.

    Args:
        args: slime's arguments: the flags above, and for FLOPs the model sizes.
        train_parallel_config: `dp_size`, `cp_size`, `vpp_size`,
            `microbatch_group_size_per_vp_stage`.
        total_lengths: tokens per sample.
        global_batch_size: rollouts per step; rollouts that fill no step are left out.
        rollout_indices: per sample its rollout; samples of one stay in one step.

    Returns:
        partitions: per rank its samples, `[dp][sample]`.
        micro_batch_indices: `[dp][mb]` places in the rank's partition, which they tile in order.
        num_microbatches: per step, the same on every rank.
        global_batch_sizes: rollouts that each step kept.

    Raises:
        ValueError: a step that no prefix of its rollouts aligns. It is an AssertionError too, as
            are the other refusals.
    """
    layout = layout_of(args, train_parallel_config)
    rollouts = Rollouts.read(rollout_indices, global_batch_size)
    if not args.use_dynamic_batch_size:
        weights = sample_flops(args, total_lengths) if _flag(args, "balance_data") else None
        return plan_static(args, layout, rollouts, weights)
    return plan_dynamic(
        args,
        layout,
        total_lengths,
        rollouts,
        balanced=_flag(args, "balance_data") or _flag(args, "balance_by_flops"),
        options=options.current,
        host="slime",
    )


def _flag(args: Any, name: str) -> bool:
    return bool(getattr(args, name, False))
