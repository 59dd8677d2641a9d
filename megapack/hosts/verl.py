"""verl: `verl.utils.seqlen_balancing`, with rows within the budget and one M on all ranks.

Each DP rank plans its own samples, and all ranks of a step run the same number of micro-batches.
If verl's own partition is within the budget, this module makes the same micro-batches. Checked
against verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megapack.base.arrays import Ints
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import ConfigError, HostAssertionError
from megapack.hosts import megatron_core, patching
from megapack.hosts.shared import rank_rows
from megapack.hosts.shared.families import real_tokens
from megapack.hosts.shared.images import patches_of
from megapack.hosts.shared.native import NativeSettings
from megapack.hosts.shared.options import HostOptions, PlannerOptions
from megapack.hosts.shared.rank_items import RankItems
from megapack.hosts.shared.rank_rows import Rows, log_own
from megapack.hosts.shared.tensor_rows import take, take_rows
from megapack.layout import Layout
from megapack.policy import Policy

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_MODULE = "verl.utils.seqlen_balancing"
_ENGINE = "verl.workers.engine.megatron.transformer_impl"

# Fields that are set to zero in padding copies: which tokens have a loss.
_LOSS_MASKS = ("loss_mask", "response_mask")


@dataclass(frozen=True, kw_only=True)
class VerlOptions(PlannerOptions):
    """Where the replacements may differ from verl's own behaviour."""

    light_rank: Literal["error", "pad"] = "error"
    """If a rank has fewer samples than M: "error" raises on all ranks, as verl does; "pad" runs
    copies of the rank's shortest sample (or smallest item) with zero loss masks. A copy has the
    indices of the samples that it copies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.light_rank not in ("error", "pad"):
            raise ConfigError(f'light_rank={self.light_rank!r}; set "error" or "pad"')


_OPTIONS = HostOptions(VerlOptions())
configure = _OPTIONS.configure
_SETTINGS = NativeSettings(_OPTIONS, megatron_core.OPTIONS)


def read_settings(config: Any) -> None:
    """Set the options of `actor_rollout_ref.megapack`; a worker of verl calls it with its config.

    Args:
        config: `actor_rollout_ref`.

    Raises:
        ConfigError: an unknown key or a value that is refused.
    """
    _SETTINGS.take(config.get("megapack"), "actor_rollout_ref.megapack")
    if not (config.get("actor") or {}).get("use_dynamic_bsz", True):
        log_own("verl", "set actor_rollout_ref.actor.use_dynamic_bsz=True")


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[Hashable], k_partitions: int
) -> Rows:
    """Partition samples by work; samples with the same uid stay together, wherever they are.

    verl's own function, which expects them side by side, gets them side by side. Every part gets
    the same number of uids.

    Raises:
        HostAssertionError: not one uid per sample.
        AssertionError: verl's own, if the uids do not divide into k parts.
    """
    if len(seqlen_list) != len(uid_list):
        raise HostAssertionError(
            f"{len(uid_list)} uids for {len(seqlen_list)} samples; give one per sample"
        )
    number_of = {uid: number for number, uid in enumerate(dict.fromkeys(uid_list))}
    order = sorted(range(len(uid_list)), key=lambda i: number_of[uid_list[i]])
    own = patching.original(f"{_MODULE}.get_group_balanced_partitions")
    parts = own([int(seqlen_list[i]) for i in order], [uid_list[i] for i in order], k_partitions)
    return [sorted(order[i] for i in part) for part in parts]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], Rows]:
    """Split this rank's batch into micro-batches of at most `max_token_len` real tokens.

    Collective over `dp_group` if it is given and `same_micro_num_in_dp` is true: every rank of the
    group calls this, and all get the same number of micro-batches or raise.

    Args:
        batch: a TensorDict, or another type that has `items()` and can be made from a dict. Real
            tokens are those of `input_ids` if it is a nested tensor, else those of
            `attention_mask` [B, S].
            Of images in `multi_modal_inputs`, micro-batches have about equal work, too.
        max_token_len: tokens of a micro-batch on this rank, before CP.
        dp_group: ranks that run the same number of micro-batches; None: this rank alone.
        num_batches_divided_by: M is a multiple of it: the G of interleaved schedules.
        same_micro_num_in_dp: False: this rank alone.
        min_num_micro_batch: least number of micro-batches.
        use_dynamic_bsz_balance: put the heaviest micro-batches into the middle.
        force_group_size: this many consecutive samples stay in one micro-batch.

    Returns:
        micro_batches: of the batch's own type.
        indices: the positions in the batch of each micro-batch's samples.

    Raises:
        HostAssertionError: on every rank: a sample, or samples that stay together, over the budget;
            or a rank cannot fill M micro-batches (unless `light_rank="pad"`).
        ScheduleError: on every rank, if one rank's batch or settings cannot be used.
    """
    options = _OPTIONS.current
    step = num_batches_divided_by or 1

    def read() -> RankItems:
        # Converted inside `read`, so that a rank with wrong arguments does not raise alone.
        _check_step(step, options)
        return RankItems(
            lengths=_token_counts(batch),
            max_tokens=int(max_token_len),
            budget="max_token_len",
            partition=_partition,
            options=options,
            group_size=force_group_size,
            step=step,
            least=min_num_micro_batch or 1,
            token_ids=_token_ids(batch) if options.share_prefixes else None,
            patches=patches_of(_image_inputs(batch)),
        )

    if dp_group is not None and same_micro_num_in_dp:
        settings = f"{max_token_len} {force_group_size} {step} {options}"
        rank, need = rank_rows.agree_on_need(read, settings, dp_group)
    else:
        rank = read()
        need = rank.need
    pads = options.light_rank == "pad"
    count = rank.shared_count(need, pads=pads, remedy=", or configure(light_rank='pad')")
    rank_rows.log_budget("verl", int(max_token_len), options.layout and options.layout.cp)
    rows = rank.rows(count)
    # The planner's own rows are already in the order of the pipeline.
    if use_dynamic_bsz_balance and not (options.layout and rows is rank.own):
        rows = rank_rows.small_at_ends(rows, rank.work)
    indices = rank.samples(rows)
    padding = [rank.samples([[rank.shortest]])[0]] * (count - len(rows))
    micro_batches = _select(batch, indices + padding)
    for micro_batch in micro_batches[len(indices) :]:
        _drop_loss(micro_batch)
    return micro_batches, indices + padding


def wide_rows(scheduler: Any, sample_id_seqlens: Sequence[tuple[int, int]]) -> list[Rows]:
    """Rows over one or several GPUs for verl's dynamic CP, planned for the configured layout.

    The patch `verl_dynamic_cp` puts it into the scheduler of Megatron-Core that verl asks. Every
    rank has the whole batch and plans it alike; a DP rank of the plan is a GPU of the DPxCP plane.

    Args:
        sample_id_seqlens: ids and tokens.

    Returns:
        The ids of each GPU, for each micro-batch; GPUs that share a row have the same.

    Raises:
        PlanError: a sample over the budget of all GPUs, or too few for the least M.
    """
    options = _OPTIONS.current
    ids, lengths = zip(*sample_id_seqlens, strict=True)
    policy = Policy(context_parallel="dynamic", oversize="error", unreachable="error")
    plan = build_dp_schedule(
        lengths,
        layout=replace(options.layout or Layout(), dp=scheduler.dp_size * scheduler.cp_size, cp=1),
        max_tokens_per_gpu=scheduler.max_seqlen_per_dp_cp_rank,
        policy=rank_rows.for_step(policy, len(ids)),
        cost=options.cost,
    )
    by_row = zip(*plan.steps[0].ranks, strict=True)
    return [[[ids[i] for i in row.samples] for row in rows] for rows in by_row]


def check_dynamic_cp(
    engine_config: Any, model_config: Any, tf_config: Any = None, batch: Any = None
) -> None:
    """verl's own refusals, but for virtual stages, whose counts `wide_rows` plans, and for what a
    batch says of distillation, which `compute_topk_loss` brings.

    Raises:
        ConfigError: virtual stages that the configured layout does not have.
    """
    if engine_config.dynamic_context_parallel:
        pp = engine_config.pipeline_model_parallel_size
        vpp = engine_config.virtual_pipeline_model_parallel_size or 1
        _OPTIONS.current.refuse_other_stages(pp, vpp, "actor_rollout_ref.megapack")
    own = patching.original(f"{_ENGINE}._check_dcp_unsupported_features")
    settings = {**vars(engine_config), "virtual_pipeline_model_parallel_size": None}
    own(SimpleNamespace(**settings), model_config, tf_config)


def compute_topk_loss(
    config: Any, distillation_config: Any, data: Any, student_logits: Any, data_format: str
) -> Any:
    """verl's loss of a row against its teacher's top k, which are cut over the row's own GPUs.

    verl cuts them over the job's CP ranks.
    """
    from verl.trainer.distillation.megatron import losses
    from verl.utils.tensordict_utils import get_non_tensor_data

    from megapack.model.replaced import replaced

    own = patching.original("verl.trainer.distillation.losses.compute_topk_loss")
    size = get_non_tensor_data(data, key="local_cp_size", default=None)
    cut = partial(losses.preprocess_thd_engine, local_cp_size=size)
    with replaced(losses, preprocess_thd_engine=cut):
        return own(config, distillation_config, data, student_logits, data_format)


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: Rows) -> torch.Tensor:
    """Put concatenated outputs of micro-batches back into the order of the batch.

    Indices [[2, 0], [1]] and outputs c, a, b give a, b, c. Outputs of padding copies are left out.

    Args:
        data: [outputs, ...], dense or nested.
        batch_idx_list: the indices that `rearrange_micro_batches` returned.

    Raises:
        HostAssertionError: the numbers of outputs and of indices differ.
    """
    indices = list(chain.from_iterable(batch_idx_list))
    if len(indices) != data.shape[0]:
        raise HostAssertionError(f"{len(indices)} indices for {data.shape[0]} rows")
    position_of: dict[int, int] = {}
    for position, sample in enumerate(indices):
        # The first is the sample itself; padding copies are last.
        position_of.setdefault(sample, position)
    order = [position_of[sample] for sample in sorted(position_of)]
    restored: torch.Tensor = take(data, order)
    return restored


def _partition(work: list[int], count: int) -> Rows:
    """verl's own partition of its samples into micro-batches."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    rows: Rows = get_seqlen_balanced_partitions(work, count, equal_size=False)
    return rows


def _check_step(step: int, options: VerlOptions) -> None:
    layout = options.layout
    if layout is not None and step not in (1, layout.group_size):
        raise ConfigError(
            f"num_batches_divided_by={step}, but the configured layout has G={layout.group_size}; "
            "configure the layout of the job"
        )


def _token_counts(batch: Any) -> Ints:
    """Real tokens per sample, with one copy from the device."""
    import torch

    if batch["input_ids"].is_nested:
        counts = batch["input_ids"].offsets().diff()
    else:
        counts = batch["attention_mask"].sum(dim=-1)
    return np.array(counts.to(torch.int64).tolist(), dtype=np.int64)


def _token_ids(batch: Any) -> list[Ints]:
    """Real tokens of each sample, with one copy from the device."""
    ids = batch["input_ids"]
    if not ids.is_nested:
        return real_tokens(ids, batch["attention_mask"])
    ends = ids.offsets().tolist()[1:-1]
    return np.split(ids.values().cpu().numpy(), ends)


def _image_inputs(batch: Any) -> list[Any]:
    """What verl's processor made of each sample's images."""
    samples = batch.get("multi_modal_inputs", None)
    # A TensorDict has each in a wrapper with it in `data`.
    return [getattr(sample, "data", sample) for sample in (() if samples is None else samples)]


def _select(batch: Any, rows: Rows) -> list[Any]:
    """The samples of each row, as batches of the same type."""
    fields = {name: take_rows(value, rows) for name, value in batch.items()}
    own = [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
    if hasattr(batch, "batch_size"):
        return [type(batch)(f, batch_size=[len(r)]) for f, r in zip(own, rows, strict=True)]
    return [type(batch)(f) for f in own]


def _drop_loss(batch: Any) -> None:
    import torch

    for name in _LOSS_MASKS:
        if name in batch.keys():  # noqa: SIM118 - a TensorDict refuses `in` itself
            batch[name] = torch.zeros_like(batch[name])
