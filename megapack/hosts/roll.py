"""ROLL: packed micro-batches within the budget, padded ones with the fewest tokens.

`LoadBalancePacker` packs the samples of one rank, `dynamic_batching_shard` those of all ranks. Seen
at ROLL's main of August 2026.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.errors import ConfigError, HostAssertionError
from megapack.hosts.shared.families import real_tokens
from megapack.hosts.shared.rank_rows import Rows, agree_on_need, log_budget, small_at_ends
from megapack.hosts.shared.verl_items import RankItems, VerlOptions
from megapack.layout import Layout, round_up

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

Range = list[int]
"""[start, end) of a micro-batch in the samples of each rank."""


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
    options = VerlOptions()

    def read() -> RankItems:
        mask = mini_batch.batch["attention_mask"]
        real = np.array(mask.sum(dim=-1).tolist(), dtype=np.int64)
        align = self.get_pad_factor(cp_size, tp_size)
        lengths = -(-real // align) * align
        token_ids = None
        if options.share_prefixes:
            token_ids = real_tokens(mini_batch.batch["input_ids"], mask)
        return RankItems(lengths, budget, 1, step, options, least=least, token_ids=token_ids)

    rank, need = agree_on_need(read, f"{name}={budget} {least} {step} {options}", dp_group)
    if need.longest > budget:
        raise HostAssertionError(
            f"a sample of {need.longest} tokens is over {name}={budget}; set it to {need.longest} "
            "or more"
        )
    rows = rank.rows(_count(rank, need.count, need.room, name))
    log_budget("roll", budget, cp_size)
    return iter(_packed(mini_batch, small_at_ends(rows, rank.work)))


def _count(rank: RankItems, needed: int, room: int, name: str) -> int:
    """M of all ranks: in multiples of `rank.step`, which is pp under interleaving."""
    count = round_up(needed, rank.step)
    if count > room:
        raise HostAssertionError(
            f"{count} micro-batches (in multiples of {rank.step}) are needed, and a rank has "
            f"{room} samples; give it more, or raise {name}={rank.max_tokens}"
        )
    return count


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

    Samples are sorted by length and dealt out to the ranks in turn, as ROLL does. A micro-batch is
    a range of each rank's samples, the same on all ranks, padded to the longest of them. ROLL fills
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
        HostAssertionError: a sample over the budget, or too few samples for the ranks or for the
            micro-batches that Megatron's interleaved schedule wants.
    """
    import torch

    mask = origin_batch.batch["attention_mask"]
    real = np.array(mask.reshape(mask.shape[0], -1).sum(-1).tolist(), dtype=np.int64)
    if real.size % dp_size or not real.size:
        raise HostAssertionError(f"{real.size} samples % dp_size={dp_size} != 0; give a multiple")
    if not real.all():
        logger.warning("roll: %d samples have no tokens; see the rollout", int((real == 0).sum()))
    order = np.argsort(real, kind="stable")
    # The last of each dp_size samples is the longest of its round.
    longest = np.maximum(real[order][dp_size - 1 :: dp_size], 1)
    widths = -(-longest // sequence_length_round) * sequence_length_round
    is_interleaved = pipeline_model_parallel_size > 1 and virtual_pipeline_model_parallel_size
    layout = Layout(
        pp=pipeline_model_parallel_size,
        vpp=virtual_pipeline_model_parallel_size or 1 if is_interleaved else 1,
    )
    ends = _ends(widths, max_tokens_per_microbatch, layout)
    batch = origin_batch.slice()
    batch.reorder(torch.from_numpy(order))
    batch = type(batch).concat([batch[rank::dp_size] for rank in range(dp_size)])
    computed = _write_ranges(batch.meta_info, ends, widths) * dp_size
    return batch, _metrics(log_prefix, int(real.sum()), mask.numel(), computed)


def _ends(widths: Ints, budget: int, layout: Layout) -> list[int]:
    """Where micro-batches end, for the fewest tokens in the least number that Megatron runs.

    Args:
        widths: int64 [n], ascending: the width of each of a rank's samples in a batch of its own.
    """
    if int(widths[-1]) > budget:
        raise HostAssertionError(
            f"a sample of {widths[-1]} tokens, rounded up, is over max_tokens_per_microbatch="
            f"{budget}; set it to {widths[-1]} or more"
        )
    tokens = _tokens_of_ranges(widths, budget)
    count = layout.next_legal_count(_fewest(tokens))
    if count > widths.size:
        raise HostAssertionError(
            f"{count} micro-batches are needed with pp={layout.pp}, vpp={layout.vpp}, and a rank "
            f"has {widths.size} samples; give it more"
        )
    return _cheapest(tokens, count)


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


def _fewest(tokens: Floats) -> int:
    """The least number of ranges: each as long as it can be."""
    most, size = tokens.shape
    start = 0
    count = 0
    while start < size:
        end = start + 1
        while end < min(size, start + most) and np.isfinite(tokens[most - (end + 1 - start), end]):
            end += 1
        start = end
        count += 1
    return count


def _cheapest(tokens: Floats, count: int) -> list[int]:
    """Ends of `count` ranges with the smallest sum of tokens."""
    most, size = tokens.shape
    # [row, end - 1]: where a range of `most - row` samples starts; ranges before 0 are infinite.
    starts = np.maximum(np.arange(1, size + 1) - np.arange(most, 0, -1)[:, None], 0)
    best = np.full(size + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for _ in range(count):
        sums = best[starts] + tokens
        rows = sums.argmin(0)
        columns = np.arange(size)
        chosen.append(starts[rows, columns])
        best = np.concatenate([[np.inf], sums[rows, columns]])
    ends = [size]
    for start in reversed(chosen[1:]):
        ends.append(int(start[ends[-1] - 1]))
    return ends[::-1]


def _write_ranges(meta_info: dict[str, Any], ends: list[int], widths: Ints) -> int:
    """Write ROLL's description of micro-batches; returns a rank's tokens."""
    ranges: list[Range] = [list(pair) for pair in zip([0, *ends], ends, strict=False)]
    lengths = [int(widths[end - 1]) for end in ends]
    for prefix in ("global_", ""):
        meta_info[f"{prefix}micro_batch_indices"] = ranges
        meta_info[f"{prefix}micro_batch_lengths"] = lengths
    meta_info["num_micro_batchs"] = len(ranges)
    return sum((end - start) * length for (start, end), length in zip(ranges, lengths, strict=True))


def _metrics(log_prefix: str | None, real: int, padded: int, computed: int) -> dict[str, float]:
    name = "dynamic_batching" + (f"/{log_prefix}" if log_prefix else "")
    return {
        f"{name}/valid_tokens": real,
        f"{name}/actual_tokens_origin": padded,
        f"{name}/actual_tokens": computed,
        f"{name}/removed_padding_tokens": padded - computed,
        f"{name}/removed_padding_ratio": (padded - computed) / padded,
    }
