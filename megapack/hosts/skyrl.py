"""SkyRL: token-based micro-batches of `worker_utils`, and `bin_packing.make_seq_packer`.

Token-based micro-batches are planned by megapack. With a layout configured, alignment counts
against the budget, micro-batches are ordered for the pipeline, and every M is one that the
interleaved schedule runs; SkyRL does not check that. Written for SkyRL's commit a956457 and for
0.4.0, whose batches have packed fields.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.base.arrays import Ints
from megapack.errors import DataError
from megapack.hosts import patching
from megapack.hosts.shared.bins import with_heaviest_split
from megapack.hosts.shared.families import family_parts, real_tokens, shared_ids
from megapack.hosts.shared.options import HostOptions, PlannerOptions
from megapack.hosts.shared.rank_rows import (
    Need,
    Rows,
    agree_on_need,
    log_budget,
    plan_rank,
    small_at_ends,
    split_rows,
)
from megapack.hosts.shared.tensor_rows import collect, take

if TYPE_CHECKING:
    pass

__all__ = [
    "SkyRLOptions",
    "TokenBasedBatchIterator",
    "configure",
    "make_seq_packer",
]


class SkyRLOptions(PlannerOptions):
    """Where the replacements may differ from SkyRL's own behaviour.

    Without a layout, micro-batches are the fewest within the budget, without regard to a pipeline.
    """


_ITERATOR = "skyrl.backends.skyrl_train.workers.worker_utils.TokenBasedBatchIterator"

_OPTIONS = HostOptions(SkyRLOptions())
configure = _OPTIONS.configure


class TokenBasedBatchIterator:
    """Micro-batches of at most `max_tokens_per_microbatch` real tokens; a larger sample is alone.

    Collective over all ranks if torch.distributed is initialized: all ranks construct it, and all
    get the same number of micro-batches or raise.
    """

    def __init__(self, data: Any, max_tokens_per_microbatch: int) -> None:
        """
        Args:
            data: a TrainingInputBatch: a dict of tensors and TensorLists with `metadata`.
            max_tokens_per_microbatch: real tokens of a micro-batch, before CP.

        Raises:
            ScheduleError: on every rank, if one rank's data or settings cannot be used.
        """
        max_tokens = int(max_tokens_per_microbatch)
        options = _OPTIONS.current
        settings = repr((max_tokens, options))
        rank, need = agree_on_need(lambda: _RankRows(data, max_tokens, options), settings, None)
        layout = options.layout
        count = need.count if layout is None else layout.next_legal_count(need.count)
        log_budget("SkyRL", max_tokens, layout and layout.cp)
        rows = split_rows(rank.rows, count, rank.lengths)
        if rows is not rank.rows:
            rows = small_at_ends(rows, rank.lengths)
        self.data = data
        self._microbatches = rows
        self._num_padding_microbatches = max(count - len(rows), 0)
        self._max_tokens_per_microbatch = max_tokens
        self._token_counts = rank.lengths.tolist()

    def __len__(self) -> int:
        return len(self._microbatches) + self._num_padding_microbatches

    def __iter__(self) -> Iterator[Any]:
        for row in self._microbatches:
            yield _select(self.data, row)
        for _ in range(self._num_padding_microbatches):
            yield self._create_padding_microbatch()

    @property
    def num_padding_microbatches(self) -> int:
        """Number of padding micro-batches at the end, which bring the count to M of all ranks."""
        return self._num_padding_microbatches

    def reorder_and_combine_batches(self, batches: list[Any]) -> Any:
        """Combine the outputs of all micro-batches into one batch in the order of `data`.

        Micro-batches [[0, 2], [1, 3]] with outputs [a, c] and [b, d] give a, b, c, d. Padding
        samples and padding micro-batches are left out.

        Raises:
            DataError: no outputs, or their number is not the number of micro-batches.
        """
        if len(batches) not in (len(self), len(self._microbatches)) or not batches:
            raise DataError(
                f"{len(batches)} outputs for {len(self)} micro-batches; give one for each, in order"
            )
        return _combine(batches[: len(self._microbatches)], self._microbatches)

    def reorder_and_combine_items(self, batches: list[list[Any]]) -> list[Any]:
        """Combine the items of all micro-batches, one for each sample, in the order of `data`.

        Micro-batches [[0, 2], [1, 3]] with items [a, c] and [b, d] give a, b, c, d. Items of
        padding samples, which come last, and of padding micro-batches are left out. SkyRL calls it
        since 0.4.

        Raises:
            DataError: a micro-batch has fewer items than samples.
        """
        items: dict[int, Any] = {}
        for row, outputs in zip(self._microbatches, batches, strict=False):
            items.update(zip(row, outputs, strict=False))
        num = sum(map(len, self._microbatches))
        if len(items) < num:
            raise DataError(f"{len(items)} items for {num} samples; give one for each sample")
        return [items[i] for i in range(num)]

    def _create_padding_microbatch(self) -> Any:
        """SkyRL's own: one sample without a loss, as wide as the real ones."""
        return patching.original(_ITERATOR)._create_padding_microbatch(self)


def make_seq_packer(
    algorithm: enum.Enum | str,
    bin_capacity: int,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> Any:
    """SkyRL's own packer, which makes missing bins by splitting the heaviest ones.

    Raises:
        ValueError: SkyRL's own, on an unknown name or a number out of range.
    """
    own = patching.original("skyrl.train.dataset.bin_packing.make_seq_packer")
    return with_heaviest_split(own(algorithm, bin_capacity, min_bin_count, bin_count_multiple))


class _RankRows:
    """This rank's samples and their micro-batches."""

    def __init__(self, data: Any, max_tokens: int, options: SkyRLOptions) -> None:
        self.lengths: Ints = np.array(_real_tokens(data), dtype=np.int64)
        if not self.lengths.size:
            raise DataError("a rank has no samples; give every rank one or more")
        parts = None
        token_ids = shared_ids(
            options, lambda: real_tokens(data["sequences"], data["attention_mask"])
        )
        if token_ids is not None:
            least = 1 if options.layout is None else options.layout.next_legal_count(1)
            parts = family_parts(
                token_ids, self.lengths, options.layout, max_tokens, num_rows=least
            )
        self.rows, count = plan_rank(
            self.lengths,
            max_tokens,
            layout=options.layout,
            cost=options.cost,
            colocate_ids=parts,
        )
        self.need = Need(count, self.lengths.size, int(self.lengths.max()))


def _real_tokens(data: Any) -> list[int]:
    """Tokens of each sample that are not padding."""
    counts: list[int] = data["attention_mask"].sum(dim=1).tolist()
    return counts


def _select(data: Any, row: list[int]) -> Any:
    """Select the samples of a row, with the batch's metadata."""
    batch = type(data)({name: take(value, row) for name, value in data.items()})
    batch.metadata = data.metadata
    return batch


def _combine(batches: list[Any], rows: Rows) -> Any:
    """Combine outputs of micro-batches in the order of the samples.

    Args:
        batches: the outputs of each micro-batch, real samples first.
        rows: the samples of each micro-batch; every sample is in one.
    """
    sample_of = list(chain.from_iterable(rows))
    order = sorted(range(len(sample_of)), key=sample_of.__getitem__)
    fields = {}
    for name in batches[0].keys():  # noqa: SIM118 - batches are sequences of samples, too
        real = [_first(batch[name], len(row)) for batch, row in zip(batches, rows, strict=True)]
        fields[name] = take(_concat(real), order)
    combined = type(batches[0])(fields)
    combined.metadata = batches[0].metadata
    return combined


def _first(value: Any, num: int) -> Any:
    return None if value is None else value[:num]


def _concat(values: list[Any]) -> Any:
    import torch

    if values[0] is None:
        return None
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values)
    return collect(type(values[0]), [value[i] for value in values for i in range(len(value))])
