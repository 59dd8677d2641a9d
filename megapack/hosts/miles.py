"""miles: the schedule of `miles.utils.dp_schedule`, and corrections of its losses."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from megapack.errors import ConfigError, PlanError
from megapack.hosts import patching
from megapack.hosts.shared import rollout_schedule
from megapack.hosts.shared.loss_tokens import without_empty_samples
from megapack.hosts.shared.rank_rows import log_own

logger = logging.getLogger(__name__)

configure = rollout_schedule.OPTIONS.configure

_RUNS_PLANNED = "miles.ray.rollout.train_data_conversion.can_schedule_on_rollout_side"
_IMAGES = "multimodal_train_inputs"
# What a processor leaves whose images' tokens miles puts in after it has split the samples.
_GROWS = {"grid_thws", "mm_vision_num_patches", "mm_audio_num_tokens"}


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, Any],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[Any],
) -> rollout_schedule.Schedule:
    """miles' schedule of one generation's samples: as slime's, with these differences.

    `vpp_size` and the VPP group size may be None. With `args.allow_partial_train_step` and dynamic
    batches, rollouts that do not fill a step make a smaller last step, which is left out if its
    samples cannot fill a row on every rank. Without dynamic batches the schedule is miles' own.

    Returns:
        partitions, micro_batch_indices, num_microbatches: as slime's.
        num_rollouts: rollouts that each step kept.

    Raises:
        ValueError: no prefix of a step's rollouts can be aligned. This error, like the other
            refusals, is an AssertionError too.
    """
    rollout_schedule.read_settings(args)
    if not args.use_dynamic_batch_size:
        ids = {"global_batch_size": global_batch_size, "rollout_indices": rollout_indices}
        return rollout_schedule.own_schedule(
            "miles", args, train_parallel_config, total_lengths, **ids
        )

    def plan(rollouts: rollout_schedule.Rollouts) -> rollout_schedule.Schedule:
        return rollout_schedule.plan_dynamic(
            args, train_parallel_config, total_lengths, rollouts, host="miles"
        )

    partial = bool(getattr(args, "allow_partial_train_step", False))
    if getattr(args, "multi_lora", False):
        # A batch is one step, and its size counts samples.
        rollout_indices = range(len(total_lengths))
    rollouts = rollout_schedule.Rollouts.read(rollout_indices, global_batch_size, partial=partial)
    try:
        return plan(rollouts)
    except PlanError:
        whole = rollout_schedule.Rollouts.read(rollout_indices, global_batch_size)
        if whole.per_step == rollouts.per_step:
            raise
        schedule = plan(whole)
        logger.info(
            "partial step skipped: its %d samples fill no row on every rank (dp=%d)",
            len(rollouts.samples) - len(whole.samples),
            train_parallel_config["dp_size"],
        )
        return schedule


def can_schedule_on_rollout_side(
    args: Any, data: dict[str, Any], train_parallel_config: Mapping[str, Any] | None
) -> bool:
    """Whether a rollout's steps are planned; without the patch they are not if there are images, or
    several adapters.

    Kimi's and Inkling's samples are not, as without the patch: their lengths change afterwards. Nor
    are static batches: only miles' other way sorts them by adapter, and fills them up.

    Raises:
        ConfigError: prefixes shared among samples with adapters, whose tokens miles counts.
    """
    own = patching.original(_RUNS_PLANNED)
    if not args.use_dynamic_batch_size:
        rollout_schedule.log_static("miles")
        return bool(own(args, data, train_parallel_config))
    if any(_GROWS & set(images or ()) for images in data.get(_IMAGES, ())):
        log_own("miles", "samples with images of Kimi or Inkling grow after they are split")
        return False
    rest = {name: values for name, values in data.items() if name != _IMAGES}
    if "adapter_slots" in data:
        if rollout_schedule.OPTIONS.current.share_prefixes:
            raise ConfigError(
                "share_prefixes=True with multi-LoRA: its layers are told the tokens of whole "
                "samples; set share_prefixes=False"
            )
        # All samples train in one step, whatever their number of rollouts.
        args, rest = copy.copy(args), {**rest, "dynamic_global_batch_size": 1}
        args.multi_lora = False
    if own(args, rest, train_parallel_config):
        return True
    size: Any = data.get("dynamic_global_batch_size") or getattr(args, "global_batch_size", 0)
    if len(set(data.get("rollout_ids", ()))) < size:
        log_own("miles", f"fewer rollouts than global_batch_size={size}; lower it, or make more")
    return False


def loss_function(args: Any, batch: Any, *rest: Any, **named: Any) -> Any:
    """miles' loss of one micro-batch, whose mean per token leaves removed samples out.

    The patch `miles_loss` puts it into the training step. Only `calculate_per_token_loss` changes,
    and only micro-batches with a sample that has no loss token; see `without_empty_samples`.
    """
    from miles.backends.training_utils.loss import loss_function as host_function

    result = host_function(args, batch, *rest, **named)
    return without_empty_samples(args, result, batch["loss_masks"])


def normalize_advantages(
    args: Any,
    advantages: list[Any],
    loss_masks: list[Any],
    total_lengths: list[int],
    response_lengths: list[int],
    max_seq_lens: list[int] | None = None,
) -> list[Any]:
    """miles' whitened advantages, by one mean and variance for all context-parallel ranks.

    miles takes those of the tokens that one context-parallel rank has, so that two parts of a
    sample are scaled differently; and a rank without response tokens leaves out the reduction that
    the others wait in. The patch `miles_loss` puts this in its place. Independent data-parallel
    replicas (fault tolerance) keep miles' own.

    Args:
        advantages: of the response tokens that this rank has, per sample.
        loss_masks: of whole responses, per sample.

    Returns:
        As `advantages`.
    """
    import torch
    from miles.backends.training_utils import cp_utils
    from miles.backends.training_utils.loss_hub.advantages import (
        normalize_advantages as host_function,
    )
    from miles.backends.training_utils.parallel import get_parallel_state
    from miles.utils.distributed_utils import distributed_masked_whiten

    state = get_parallel_state()
    sizes = (total_lengths, response_lengths)
    if state.cp.size == 1 or state.indep_dp.size > 1:
        return host_function(args, advantages, loss_masks, *sizes, max_seq_lens)  # type: ignore[no-any-return]
    masks = cp_utils.get_local_response_loss_masks(
        *sizes, loss_masks, args.qkv_format, max_seq_lens
    )
    whitened = distributed_masked_whiten(
        torch.cat(advantages),
        torch.cat(masks),
        process_group=state.intra_dp_cp.group,
        shift_mean=True,
    )
    return list(whitened.split([len(values) for values in advantages]))
