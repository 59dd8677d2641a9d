"""verl: `verl.utils.seqlen_balancing`, with rows within the budget and one M on all ranks.

Each DP rank plans its own samples, and all ranks of a step run the same number of micro-batches.
If verl's own partition is within the budget, this module makes the same micro-batches. Checked
against verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.base.arrays import Ints
from megapack.errors import DataError, HostAssertionError
from megapack.hosts import megatron_core
from megapack.hosts.shared.balancing import get_seqlen_balanced_partitions
from megapack.hosts.shared.families import real_tokens
from megapack.hosts.shared.native import NativeSettings
from megapack.hosts.shared.options import HostOptions
from megapack.hosts.shared.rank_rows import (
    Rows,
    agree_on_need,
    log_budget,
    small_at_ends,
)
from megapack.hosts.shared.tensor_rows import take, take_rows
from megapack.hosts.shared.verl_items import (
    RankItems,
    VerlOptions,
    calculate_workload,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = [
    "VerlOptions",
    "configure",
    "get_group_balanced_partitions",
    "read_settings",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
]

# Fields that are set to zero in padding copies: which tokens have a loss.
_LOSS_MASKS = ("loss_mask", "response_mask")

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


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[Hashable], k_partitions: int
) -> Rows:
    """Partition samples by work; samples with the same uid stay together, wherever they are.

    Every part gets the same number of uids.

    Raises:
        HostAssertionError: not one uid per sample, or the uids do not divide into k parts.
    """
    if len(seqlen_list) != len(uid_list):
        raise HostAssertionError(
            f"{len(uid_list)} uids for {len(seqlen_list)} samples; give one per sample"
        )
    work = calculate_workload(_read_integers(seqlen_list)).tolist()
    samples_of: dict[Hashable, list[int]] = {}
    for sample, uid in enumerate(uid_list):
        samples_of.setdefault(uid, []).append(sample)
    groups = list(samples_of.values())
    parts = get_seqlen_balanced_partitions(
        [sum(work[i] for i in group) for group in groups], k_partitions, equal_size=True
    )
    return [sorted(chain.from_iterable(groups[g] for g in part)) for part in parts]


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
    settings = (force_group_size, num_batches_divided_by or 1, options)

    def read() -> RankItems:
        # Converted inside `read`, so that a rank with wrong arguments does not raise alone.
        budget = int(max_token_len)
        least = min_num_micro_batch or 1
        token_ids = _token_ids(batch) if options.share_prefixes else None
        lengths = _token_counts(batch)
        return RankItems(lengths, budget, *settings, least=least, token_ids=token_ids)

    if dp_group is not None and same_micro_num_in_dp:
        rank, need = agree_on_need(read, f"{max_token_len} {settings}", dp_group)
    else:
        rank = read()
        need = rank.need
    count = rank.shared_count(need)
    log_budget("verl", int(max_token_len), options.layout and options.layout.cp)
    rows = rank.rows(count)
    # The planner's own rows are already in the order of the pipeline.
    if use_dynamic_bsz_balance and not (options.layout and rows is rank.own):
        rows = small_at_ends(rows, rank.work)
    indices = rank.samples(rows)
    padding = [rank.samples([[rank.shortest]])[0]] * (count - len(rows))
    micro_batches = _select(batch, indices + padding)
    for micro_batch in micro_batches[len(indices) :]:
        _drop_loss(micro_batch)
    return micro_batches, indices + padding


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


def _read_integers(values: Any) -> Ints:
    array = np.asarray(values.tolist() if hasattr(values, "tolist") else list(values))
    if array.size and array.dtype.kind not in "iub" and not np.array_equal(array, array.round()):
        raise DataError(f"values are {array.dtype}; give integers")
    return array.astype(np.int64)


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
