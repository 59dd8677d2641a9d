"""slime: the schedule of `slime.utils.dp_schedule`, and corrections of its losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megapack.errors import DataError
from megapack.hosts import patching
from megapack.hosts.shared.families import callers_tokens
from megapack.hosts.shared.flops import knows_sizes, sample_flops
from megapack.hosts.shared.loss_tokens import without_empty_samples
from megapack.hosts.shared.native import Provider
from megapack.hosts.shared.rollout_schedule import (
    OPTIONS,
    SETTINGS,
    Rollouts,
    Schedule,
    layout_of,
    plan_dynamic,
    plan_static,
    read_settings,
)

__all__ = [
    "build_dp_schedule",
    "configure",
    "get_slime_extra_args_provider",
    "loss_function",
    "read_settings",
]

configure = OPTIONS.configure


def get_slime_extra_args_provider(add_custom_arguments: Provider | None = None) -> Provider:
    """slime's arguments, and one `--megapack-...` for each option."""
    own = patching.original("slime.utils.arguments.get_slime_extra_args_provider")
    provider: Provider = own(SETTINGS.before(add_custom_arguments))
    return provider


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, Any],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[Any] | None = None,
    group_indices: Sequence[Any] | None = None,
) -> Schedule:
    """slime's schedule of one generation's samples.

    With `use_dynamic_batch_size` a row holds at most `max_tokens_per_gpu * cp_size` padded tokens;
    a larger sample is alone. A step that reaches no multiple of `dp_size * mb_group` drops whole
    trailing rollouts, with a warning. Ranks are always balanced by FLOPs; `balance_data` or
    `balance_by_flops` let the search take longer, and neither allows a row over the budget.

    Without dynamic batches, micro-batches have `micro_batch_size` samples; `balance_data` balances
    them over ranks by FLOPs, otherwise ranks get them in turn. Without the model's sizes in `args`,
    tokens stand for FLOPs.

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
    read_settings(args)
    layout = layout_of(args, train_parallel_config)
    token_ids = None
    if OPTIONS.current.share_prefixes:
        token_ids = callers_tokens(total_lengths, lambda data: data.get("tokens"))
    rollouts = _rollouts(rollout_indices, group_indices, global_batch_size)
    if not args.use_dynamic_batch_size:
        weights = _weights(args, total_lengths) if _flag(args, "balance_data") else None
        return plan_static(args, layout, rollouts, weights)
    return plan_dynamic(
        args,
        layout,
        total_lengths,
        rollouts,
        balanced=_flag(args, "balance_data") or _flag(args, "balance_by_flops"),
        options=OPTIONS.current,
        host="slime",
        token_ids=token_ids,
    )


def _rollouts(
    rollout_indices: Sequence[Any] | None,
    group_indices: Sequence[Any] | None,
    global_batch_size: int,
) -> Rollouts:
    given = [ids for ids in (rollout_indices, group_indices) if ids is not None]
    if len(given) != 1:
        raise DataError(
            f"{len(given)} of rollout_indices and group_indices were given; pass one, "
            "the rollout of each sample"
        )
    noun = "rollouts" if group_indices is None else "groups"
    return Rollouts.read(given[0], global_batch_size, noun=noun)


def _weights(args: Any, lengths: Sequence[int]) -> Sequence[float]:
    return sample_flops(args, lengths) if knows_sizes(args) else list(lengths)


def _flag(args: Any, name: str) -> bool:
    return bool(getattr(args, name, False))


def loss_function(
    args: Any,
    batch: Any,
    num_microbatches: int,
    step_global_batch_size: int,
    logits: Any,
) -> Any:
    """slime's loss of one micro-batch, whose mean per token leaves removed samples out.

    The patch `slime_loss` puts it into the training step. Only `calculate_per_token_loss` changes,
    and only micro-batches with a sample that has no loss token; see `without_empty_samples`.
    """
    from slime.backends.megatron_utils.loss import loss_function as host_function

    result = host_function(args, batch, num_microbatches, step_global_batch_size, logits)
    if not args.calculate_per_token_loss:
        return result
    return without_empty_samples(result, batch["loss_masks"])
