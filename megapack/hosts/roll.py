"""ROLL: packed micro-batches within the budget, padded ones with the fewest tokens.

`LoadBalancePacker` packs the samples of one rank, `dynamic_batching_shard` those of all ranks. Seen
at ROLL's main of August 2026.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.errors import ConfigError, HostAssertionError
from megapack.hosts import patching
from megapack.hosts.shared.families import real_tokens
from megapack.hosts.shared.options import PlannerOptions
from megapack.hosts.shared.rank_items import RankItems
from megapack.hosts.shared.rank_rows import Rows, agree_on_need, log_budget, small_at_ends
from megapack.layout import Layout

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


def dynamic_batching_shard(
    origin_batch: Any,
    dp_size: int,
    max_tokens_per_microbatch: int,
    sequence_length_round: int,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    log_prefix: str | None = None,
) -> tuple[Any, dict[str, float]]:
    """Give each rank samples of about equal lengths, in padded micro-batches of few tokens.

    ROLL sorts samples by length and deals them out to the ranks in turn. A micro-batch is a range
    of each rank's samples, the same on all ranks, padded to the longest of them. ROLL fills
    micro-batches from the shortest sample on; these have the fewest tokens of all ways to make as
    many micro-batches. Lengths 1, 1, 4, 4 with room for 12: ROLL pads 1, 1, 4 to 12 tokens and runs
    16, while two and two have 10.

    Args:
        origin_batch: a DataProto with `attention_mask` [B, ...], B a multiple of `dp_size`.
        max_tokens_per_microbatch: budget of a micro-batch on a rank, padding included.
        sequence_length_round: lengths are rounded up to a multiple of it.
        log_prefix: part of the metrics' names.

    Returns:
        batch: the samples of rank 0, then those of rank 1, ...; its meta_info has the ranges.
        metrics: real tokens, tokens with padding, and the padding that is gone.

    Raises:
        HostAssertionError: too few samples for the ranks or for the micro-batches that Megatron's
            interleaved schedule wants.
        AssertionError: ROLL's own, of a sample over the budget.
    """
    num_samples = len(origin_batch.batch["attention_mask"])
    if num_samples % dp_size or not num_samples:
        raise HostAssertionError(f"{num_samples} samples % dp_size={dp_size} != 0; give a multiple")
    settings = (dp_size, max_tokens_per_microbatch, sequence_length_round)
    own = patching.original("roll.utils.dynamic_batching.dynamic_batching_shard")
    # Without a pipeline ROLL's ranges end where they must, and no count is refused.
    batch, metrics = own(origin_batch, *settings, log_prefix=log_prefix)
    mask = batch.batch["attention_mask"]
    real = np.array(mask.reshape(num_samples, -1).sum(-1).tolist(), dtype=np.int64)
    longest = np.maximum(real.reshape(dp_size, -1).max(axis=0), 1)
    widths = -(-longest // sequence_length_round) * sequence_length_round
    is_interleaved = pipeline_model_parallel_size > 1 and virtual_pipeline_model_parallel_size
    layout = Layout(
        pp=pipeline_model_parallel_size,
        vpp=virtual_pipeline_model_parallel_size or 1 if is_interleaved else 1,
    )
    ends = _ends(widths, max_tokens_per_microbatch, layout)
    computed = _write_ranges(batch.meta_info, ends, widths) * dp_size
    name = "dynamic_batching" + (f"/{log_prefix}" if log_prefix else "")
    padded = metrics[f"{name}/actual_tokens_origin"]
    metrics[f"{name}/actual_tokens"] = computed
    metrics[f"{name}/removed_padding_tokens"] = padded - computed
    metrics[f"{name}/removed_padding_ratio"] = (padded - computed) / padded
    return batch, metrics


def _ends(widths: Ints, budget: int, layout: Layout) -> list[int]:
    """Where micro-batches end, for the fewest tokens in the least number that Megatron runs.

    Args:
        widths: int64 [n], ascending: the width of each of a rank's samples in a batch of its own.
    """
    tokens = _tokens_of_ranges(widths, budget)
    most, size = tokens.shape
    # [row, end - 1]: where a range of `most - row` samples starts; ranges before 0 are infinite.
    starts = np.maximum(np.arange(1, size + 1) - np.arange(most, 0, -1)[:, None], 0)
    # The fewest tokens of the samples before each end, in as many ranges as `chosen` has.
    best = np.full(size + 1, np.inf)
    best[0] = 0.0
    chosen: list[Ints] = []
    while not (np.isfinite(best[size]) and layout.is_legal_count(len(chosen))):
        if len(chosen) == size:
            raise HostAssertionError(
                f"more micro-batches are needed with pp={layout.pp}, vpp={layout.vpp} than the "
                f"{size} samples that a rank has; give it more"
            )
        sums = best[starts] + tokens
        rows = sums.argmin(0)
        columns = np.arange(size)
        chosen.append(starts[rows, columns])
        best = np.concatenate([[np.inf], sums[rows, columns]])
    ends = [size]
    for start in reversed(chosen[1:]):
        ends.append(int(start[ends[-1] - 1]))
    return ends[::-1]


def _tokens_of_ranges(widths: Ints, budget: int) -> Floats:
    """float64 [most, n]: tokens of the `most - row` samples before an end; infinite if too many.

    `most` is how many of the narrowest samples fit: with widths 2, 2, 8 and a budget of 8 it is 4,
    cut to 3. Of its last column (ends behind the third sample) only one sample is finite.
    """
    most = min(widths.size, budget // int(widths[0]))
    number = np.arange(most, 0, -1)[:, None]
    tokens: Floats = (number * widths[None, :]).astype(float)
    tokens[(number > np.arange(1, widths.size + 1)) | (tokens > budget)] = np.inf
    return tokens


def _write_ranges(meta_info: dict[str, Any], ends: list[int], widths: Ints) -> int:
    """Write ROLL's description of micro-batches; returns a rank's tokens."""
    ranges = [[start, end] for start, end in zip([0, *ends], ends, strict=False)]
    lengths = [int(widths[end - 1]) for end in ends]
    for prefix in ("global_", ""):
        meta_info[f"{prefix}micro_batch_indices"] = ranges
        meta_info[f"{prefix}micro_batch_lengths"] = lengths
    meta_info["num_micro_batchs"] = len(ranges)
    return sum((end - start) * length for (start, end), length in zip(ranges, lengths, strict=True))
