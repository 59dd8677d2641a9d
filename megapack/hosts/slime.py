"""slime: the schedule of `slime.utils.dp_schedule`, and corrections of its losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megapack.errors import DataError
from megapack.hosts.shared import rollout_schedule
from megapack.hosts.shared.loss_tokens import without_empty_samples

configure = rollout_schedule.OPTIONS.configure


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, Any],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[Any] | None = None,
    group_indices: Sequence[Any] | None = None,
) -> rollout_schedule.Schedule:
    """slime's schedule of one generation's samples.

    With `use_dynamic_batch_size` a row holds at most `max_tokens_per_gpu * cp_size` padded tokens;
    a larger sample is alone. A step that reaches no multiple of `dp_size * mb_group` drops whole
    trailing rollouts, with a warning. Ranks are always balanced by FLOPs; `balance_data` or
    `balance_by_flops` let the search take longer, and neither allows a row over the budget.

    Without dynamic batches the schedule is slime's own. Without the model's sizes in `args`, tokens
    stand for FLOPs.

    Args:
        args: slime's arguments: the flags above, and the model sizes for FLOPs.
        train_parallel_config: `dp_size`, `cp_size`, `vpp_size`,
            `microbatch_group_size_per_vp_stage`.
        total_lengths: tokens per sample.
        global_batch_size: rollouts per step; rollouts that do not fill a step are left out.
        rollout_indices: the rollout of each sample; samples of one rollout stay in one step.
        group_indices: the same by the name that slime 0.3.0 has for it.

    Returns:
        partitions: `[dp][sample]`: the samples of each rank.
        micro_batch_indices: `[dp][micro-batch]`: positions in the rank's partition, consecutive
            from 0 on.
        num_microbatches: M of each step, the same on every rank.
        global_batch_sizes: rollouts that each step kept.

    Raises:
        DataError: neither or both of `rollout_indices` and `group_indices`.
        ValueError: no prefix of a step's rollouts can be aligned. This error, like the other
            refusals, is an AssertionError too.
    """
    rollout_schedule.read_settings(args)
    ids = {"rollout_indices": rollout_indices, "group_indices": group_indices}
    given = {name: values for name, values in ids.items() if values is not None}
    if len(given) != 1:
        raise DataError(
            f"{len(given)} of rollout_indices and group_indices were given; pass one, "
            "the rollout of each sample"
        )
    if not args.use_dynamic_batch_size:
        sizes = train_parallel_config, total_lengths
        return rollout_schedule.own_schedule(
            "slime", args, *sizes, global_batch_size=global_batch_size, **given
        )
    ((name, values),) = given.items()
    noun = name.replace("_indices", "s")
    rollouts = rollout_schedule.Rollouts.read(values, global_batch_size, noun=noun)
    return rollout_schedule.plan_dynamic(
        args, train_parallel_config, total_lengths, rollouts, host="slime"
    )


def loss_function(args: Any, batch: Any, *rest: Any, **named: Any) -> Any:
    """slime's loss of one micro-batch, whose mean per token leaves removed samples out.

    The patch `slime_loss` puts it into the training step. Only `calculate_per_token_loss` changes,
    and only micro-batches with a sample that has no loss token; see `without_empty_samples`.
    """
    from slime.backends.megatron_utils.loss import loss_function as host_function

    result = host_function(args, batch, *rest, **named)
    return without_empty_samples(args, result, batch["loss_masks"])
