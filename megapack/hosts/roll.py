"""ROLL: packed micro-batches within the budget. Padded ones stay ROLL's own.

`LoadBalancePacker` packs the samples of one rank. Seen at ROLL's main of August 2026.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.errors import ConfigError
from megapack.hosts.shared.families import real_tokens
from megapack.hosts.shared.options import PlannerOptions
from megapack.hosts.shared.rank_items import RankItems
from megapack.hosts.shared.rank_rows import Rows, agree_on_need, log_budget, small_at_ends

if TYPE_CHECKING:
    import torch.distributed as dist


def make_micro_batch_iter_for_sequence_packing(
    self: Any,
    mini_batch: Any,
    tp_size: int,
    cp_size: int,
    vp_size: int,
    is_train: bool = False,
    dp_group: dist.ProcessGroup | None = None,
    micro_batch_size: int | None = None,
) -> Iterator[Any]:
    """Split this rank's mini-batch into micro-batches of at most the configured packed length.

    Replaces a method of `LoadBalancePacker`. Collective over `dp_group`: all its ranks get the same
    number of micro-batches, one that Megatron runs, or all raise.

    Args:
        mini_batch: a DataProto with `attention_mask` [B, S], and `input_ids` for
            MEGAPACK_SHARE_PREFIXES=1, under which samples with common beginnings are packed into
            one micro-batch. Its meta_info gets `partition_indices_list`, by which ROLL restores the
            order of results.
        vp_size: chunks of a stage; 1 or None without interleaving.
        is_train: which of the two lengths and least counts of the config hold.
        micro_batch_size: not used.

    Returns:
        DataProtos with the meta_info that ROLL gives its own.

    Raises:
        HostAssertionError: on every rank: a sample over the budget, or a rank with fewer samples
            than micro-batches.
        ScheduleError: on every rank, if one rank's batch or settings cannot be used.
    """
    name = f"max_packed_sequence_length_{'train' if is_train else 'forward'}"
    budget = getattr(self.config, name)
    if budget is None:
        raise ConfigError(f"{name} is not set; set the tokens of a packed micro-batch")
    least = getattr(self.config, f"min_num_micro_batches_{'train' if is_train else 'forward'}")
    step = _pipeline_size() if (vp_size or 1) > 1 else 1
    # ROLL has no layout to tell: its rows are planned by their tokens.
    options = PlannerOptions()

    def read() -> RankItems:
        mask = mini_batch.batch["attention_mask"]
        real = np.array(mask.sum(dim=-1).tolist(), dtype=np.int64)
        align = self.get_pad_factor(cp_size, tp_size)
        lengths = -(-real // align) * align
        shares = options.share_prefixes
        ids = real_tokens(mini_batch.batch["input_ids"], mask) if shares else None
        return RankItems(
            lengths=lengths,
            max_tokens=budget,
            budget=name,
            partition=_partition,
            options=options,
            step=step,
            least=least,
            token_ids=ids,
        )

    rank, need = agree_on_need(read, f"{name}={budget} {least} {step} {options}", dp_group)
    rows = rank.rows(rank.shared_count(need))
    log_budget("roll", budget, cp_size)
    return iter(_packed(mini_batch, small_at_ends(rows, rank.work)))


def _partition(work: list[int], count: int) -> Rows:
    """ROLL's own partition of its samples into micro-batches."""
    from roll.utils.functionals import get_seqlen_balanced_partitions

    rows: Rows = get_seqlen_balanced_partitions(work, count, equal_size=False)
    return rows


def _pipeline_size() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_world_size())


def _packed(mini_batch: Any, rows: Rows) -> list[Any]:
    mini_batch.meta_info["partition_indices_list"] = [list(row) for row in rows]
    found = []
    for number, row in enumerate(rows):
        micro_batch = mini_batch.select_idxs(row)
        micro_batch.meta_info = {
            **copy.deepcopy(mini_batch.meta_info),
            "micro_batch_idx": number,
            "is_padding_batch": False,
            "partition_indices": row,
            # ROLL's own spelling.
            "num_micro_batchs": len(rows),
            "mini_batch_size": len(mini_batch),
        }
        found.append(micro_batch)
    return found
