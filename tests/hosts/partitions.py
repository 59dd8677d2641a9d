"""Stand-ins for hosts' own partitions and packers, which rows are made of without a layout."""

from __future__ import annotations

import itertools
from typing import Any

from megapack.hosts import nemo_rl


def evenly(work: list[int], count: int) -> list[list[int]]:
    """`count` parts of about even sums: the heaviest item goes into the lightest part.

    Work 30, 30, 20, 20, 20 in two parts is 70 and 50. Items of equal work are in a mixed order, so
    that samples of one group do not meet by chance.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for item in sorted(range(len(work)), key=lambda item: (-work[item], item * 7 % 11)):
        lightest = sums.index(min(sums))
        parts[lightest].append(item)
        sums[lightest] += work[item]
    return parts


def within(spec: Any, tokens: list[int], count: int) -> list[list[int]]:
    """As AReaL's: `count` groups or more, in multiples, within the budget; [] if there are none."""
    step = spec.n_mbs_divisor
    for number in range(-(-count // step) * step, len(tokens) + 1, step):
        parts = evenly(tokens, number)
        if max(sum(tokens[i] for i in part) for part in parts) <= spec.max_tokens_per_mb:
            return parts
    return []


class HostPacker:
    """What the replacement needs of NeMo-RL's packers: next-fit, and a number of bins."""

    def __init__(self, capacity: int, least: int | None, multiple: int | None) -> None:
        self.bin_capacity = capacity
        self.min_bin_count = least
        self.bin_count_multiple = multiple

    def _pack_implementation(self, lengths: list[int]) -> list[list[int]]:
        bins: list[list[int]] = []
        for i, length in enumerate(lengths):
            if length > self.bin_capacity:
                raise ValueError(f"Sequence length {length} exceeds bin capacity")
            if not bins or sum(lengths[k] for k in bins[-1]) + length > self.bin_capacity:
                bins.append([])
            bins[-1].append(i)
        return bins

    def pack(self, lengths: list[int]) -> list[list[int]]:
        bins = self._pack_implementation(lengths)
        wanted = max(len(bins), self.min_bin_count or 0)
        wanted = -(-wanted // (self.bin_count_multiple or 1)) * (self.bin_count_multiple or 1)
        if wanted > len(bins):
            raise ValueError(f"Cannot create {wanted} bins with only {len(lengths)} sequences")
        return bins


def sharded(
    data: Any,
    shards: int,
    batch_size: int | None,
    uneven: bool,
    dynamic: dict[str, Any] | None,
    packing: dict[str, Any] | None,
) -> Any:
    """What NeMo-RL's `shard_by_batch_size` does with packed sequences."""
    assert packing is not None
    lengths = [int(n) for n in data.data[packing["input_lengths_key"]]]
    unit = packing["sequence_length_pad_multiple"]
    padded = [-(-length // unit) * unit for length in lengths]
    size = batch_size or len(lengths)
    packer = nemo_rl.get_packer(
        packing["algorithm"],
        packing["max_tokens_per_microbatch"],
        min_bin_count=shards,
        bin_count_multiple=shards,
    )
    steps = []
    for first in range(0, len(lengths), size):
        bins = packer.pack(padded[first : first + size])
        steps.append([[first + i for i in row] for row in bins])
    made, indices = [], []
    for shard in range(shards):
        own = [bins[shard::shards] for bins in steps]
        rows = [i for bins in own for row in bins for i in row]
        part = data.select_indices(rows).slice(0, len(rows))
        ends = [list(itertools.accumulate(map(len, bins), initial=0)) for bins in own]
        part.micro_batch_indices = [list(map(list, itertools.pairwise(end))) for end in ends]
        part.micro_batch_lengths = [[sum(padded[i] for i in row) for row in bins] for bins in own]
        part.elem_counts_per_gb = [end[-1] for end in ends]
        made.append(part)
        indices += rows
    return made, indices
