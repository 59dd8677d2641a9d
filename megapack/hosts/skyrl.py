"""SkyRL: micro-batch iterators of `worker_utils`, and `bin_packing.make_seq_packer`.

Token-based micro-batches are planned by megapack. With a layout configured, alignment and the
pipeline's order count, and every count is one that the interleaved schedule runs, which SkyRL
leaves to chance. Read at commit a956457.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.base.arrays import Ints
from megapack.cost.model import CostModel
from megapack.errors import ConfigError, DataError
from megapack.hosts.shared import bin_packers
from megapack.hosts.shared.options import HostOptions
from megapack.hosts.shared.rank_rows import (
    Need,
    Rows,
    agree_on_need,
    log_budget,
    plan_rank,
    small_at_ends,
    split_rows,
)
from megapack.hosts.shared.tensor_rows import take
from megapack.layout import Layout

if TYPE_CHECKING:
    import torch

__all__ = [
    "SampleBasedBatchIterator",
    "SkyRLOptions",
    "TokenBasedBatchIterator",
    "configure",
    "get_microbatch_iterator",
    "make_seq_packer",
]

_RULES: dict[str, bin_packers.Rule] = {
    "FIRST_FIT_DECREASING": bin_packers.first_fit_decreasing,
    "BALANCED": bin_packers.least_loaded,
}


@dataclass(frozen=True, kw_only=True)
class SkyRLOptions:
    """What may differ from SkyRL's own behaviour."""

    layout: Layout | None = None
    """The job's layout: rows are planned and ordered for its pipeline, alignment counts, and M is a
    count that Megatron runs. None: as few micro-batches as fit, whatever the pipeline."""
    cost: CostModel | None = None
    """Seconds of a micro-batch, for planning with a layout; None balances tokens."""
    uniform_micro_batch_size: bool = False
    """Add padding samples so that a rank's micro-batches have the same number of samples, as
    Megatron's schedules want of batches that are not packed."""

    def __post_init__(self) -> None:
        if self.cost is not None and self.layout is None:
            raise ConfigError("cost without layout is not looked at; set both")


_OPTIONS = HostOptions(SkyRLOptions())
configure = _OPTIONS.configure


class _BatchIterator:
    """Micro-batches of a TrainingInputBatch: planned ones, then padding ones."""

    def __init__(self, data: Any, microbatches: Rows, count: int) -> None:
        """
        Args:
            microbatches: per micro-batch its samples.
            count: micro-batches with padding ones.
        """
        self.data = data
        self._microbatches = microbatches
        self._num_padding_microbatches = max(count - len(microbatches), 0)
        self._micro_batch_size: int | None = None
        if _OPTIONS.current.uniform_micro_batch_size:
            self._micro_batch_size = max(map(len, microbatches))

    def __len__(self) -> int:
        return len(self._microbatches) + self._num_padding_microbatches

    def __iter__(self) -> Iterator[Any]:
        for row in self._microbatches:
            yield self._sized(_select(self.data, row))
        for _ in range(self._num_padding_microbatches):
            yield self._sized(self._create_padding_microbatch())

    @property
    def num_padding_microbatches(self) -> int:
        """Micro-batches without samples, at the end: they make the count what all ranks run."""
        return self._num_padding_microbatches

    def reorder_and_combine_batches(self, batches: list[Any]) -> Any:
        """Outputs of all micro-batches as one batch in the order of `data`.

        Micro-batches [[0, 2], [1, 3]] with rows a c, b d give a, b, c, d. Rows and micro-batches of
        padding are left out.

        Raises:
            DataError: no outputs, or another number than micro-batches.
        """
        if len(batches) not in (len(self), len(self._microbatches)) or not batches:
            raise DataError(
                f"{len(batches)} outputs for {len(self)} micro-batches; give one for each, in order"
            )
        return _combine(batches[: len(self._microbatches)], self._microbatches)

    def _create_padding_microbatch(self) -> Any:
        """One sample that counts for nothing, as long as the real ones."""
        return _padding_rows(self.data, 1)

    def _sized(self, batch: Any) -> Any:
        missing = (self._micro_batch_size or 0) - len(batch["sequences"])
        return (
            _stack(batch, _padding_rows(self.data, missing, like=batch)) if missing > 0 else batch
        )


class TokenBasedBatchIterator(_BatchIterator):
    """Micro-batches of at most so many real tokens; a sample over that is alone.

    Collective over all ranks where torch.distributed is initialized: all make it, get the same
    number of micro-batches, or raise.
    """

    def __init__(self, data: Any, max_tokens_per_microbatch: int) -> None:
        """
        Args:
            data: a TrainingInputBatch: a dict of tensors and TensorLists with `metadata`.
            max_tokens_per_microbatch: real tokens of a micro-batch, before CP.

        Raises:
            ScheduleError: on every rank, where one rank's data or settings cannot be used.
        """
        max_tokens, options = int(max_tokens_per_microbatch), _OPTIONS.current
        settings = repr((max_tokens, options))
        rank, need = agree_on_need(lambda: _RankRows(data, max_tokens, options), settings, None)
        layout = options.layout
        count = need.count if layout is None else layout.next_legal_count(need.count)
        log_budget("SkyRL", max_tokens, layout and layout.cp)
        rows = split_rows(rank.rows, count, rank.lengths)
        if rows is not rank.rows:
            rows = small_at_ends(rows, rank.lengths)
        super().__init__(data, rows, count)
        self._max_tokens_per_microbatch = max_tokens
        self._token_counts = rank.lengths.tolist()


class SampleBasedBatchIterator(_BatchIterator):
    """Micro-batches of so many consecutive samples, the last one of fewer.

    With a layout configured, padding micro-batches follow up to a count that Megatron runs.
    """

    def __init__(self, data: Any, sample_batch_size: int, drop_last: bool = False) -> None:
        """
        Raises:
            ConfigError: a size below 1, or drop_last, which would lose samples.
        """
        if drop_last:
            raise ConfigError("drop_last=True would lose samples; set False")
        if sample_batch_size < 1:
            raise ConfigError(f"sample_batch_size={sample_batch_size}; set 1 or more")
        self.sample_batch_size, self.drop_last = sample_batch_size, drop_last
        self.total_batch_size = len(data["sequences"])
        samples = list(range(self.total_batch_size))
        rows = [samples[i : i + sample_batch_size] for i in samples[::sample_batch_size]]
        layout = _OPTIONS.current.layout
        super().__init__(data, rows, layout.next_legal_count(len(rows)) if layout else len(rows))
        self.num_micro_batches = len(self)


def get_microbatch_iterator(
    data: Any, micro_batch_size: int, max_tokens_per_microbatch: int
) -> TokenBasedBatchIterator | SampleBasedBatchIterator:
    """By tokens where `max_tokens_per_microbatch` is positive, else by samples; -1 turns it off."""
    if max_tokens_per_microbatch > 0:
        return TokenBasedBatchIterator(data, max_tokens_per_microbatch)
    return SampleBasedBatchIterator(data, micro_batch_size)


def make_seq_packer(
    algorithm: enum.Enum | str,
    bin_capacity: int,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> bin_packers.SequencePacker:
    """A packer by name, or by the host's enum.

    "first_fit_decreasing" refuses a sequence over the capacity; "balanced" fills the emptiest bin
    and leaves it alone. Where more bins are asked for, the heaviest are split.

    Raises:
        ConfigError: an unknown name, or a number out of range.
    """
    name, rule = bin_packers.choose(algorithm, _RULES)
    return bin_packers.SequencePacker(
        rule, bin_capacity, min_bin_count, bin_count_multiple, oversize_alone=name == "BALANCED"
    )


class _RankRows:
    """This rank's samples and their micro-batches."""

    def __init__(self, data: Any, max_tokens: int, options: SkyRLOptions) -> None:
        self.lengths: Ints = np.array(_real_tokens(data), dtype=np.int64)
        if not self.lengths.size:
            raise DataError("a rank has no samples; give every rank one or more")
        self.rows, count = plan_rank(
            self.lengths, max_tokens, layout=options.layout, cost=options.cost
        )
        self.need = Need(count, self.lengths.size, int(self.lengths.max()))


def _real_tokens(data: Any) -> list[int]:
    """Tokens of each sample that are not padding."""
    counts: list[int] = data["attention_mask"].sum(dim=1).tolist()
    return counts


def _select(data: Any, row: list[int]) -> Any:
    """The samples of a row, with the batch's metadata."""
    batch = type(data)({name: take(value, row) for name, value in data.items()})
    batch.metadata = data.metadata
    return batch


def _padding_rows(data: Any, num: int, *, like: Any = None) -> Any:
    """Samples without a loss, as wide as those of `data`: one token each that attention sees.

    Args:
        like: the batch that they are appended to: its means over responses leave them out, and
            fields of tensors of unequal shapes repeat its first one. None: they are a batch of
            their own, in which no mean divides by zero, without such fields.
    """
    import torch

    fields: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            rows = value.new_zeros((num, *value.shape[1:]))
            alone = like is None or name != "response_mask"
            fields[name] = _FILL[name](rows) if alone and name in _FILL else rows
        elif value is None:
            fields[name] = None
        elif like is not None:
            fields[name] = type(value)([like[name][0]] * num)
    batch = type(data)(fields)
    batch.metadata = {**(data.metadata or {}), "is_padding_batch": True}
    return batch


def _stack(first: Any, second: Any) -> Any:
    """The samples of both, with the fields and the metadata of the first."""
    batch = type(first)({name: _joined([value, second[name]]) for name, value in first.items()})
    batch.metadata = first.metadata
    return batch


def _combine(batches: list[Any], rows: Rows) -> Any:
    """Outputs of micro-batches in the order of the samples.

    Args:
        batches: per micro-batch a batch whose first samples are those of its row.
        rows: per micro-batch its samples, each of them in one.
    """
    sample_of = list(chain.from_iterable(rows))
    order = sorted(range(len(sample_of)), key=sample_of.__getitem__)
    fields = {}
    for name in batches[0].keys():  # noqa: SIM118 - batches are sequences of samples, too
        real = [_first(batch[name], len(row)) for batch, row in zip(batches, rows, strict=True)]
        fields[name] = take(_joined(real), order)
    combined = type(batches[0])(fields)
    combined.metadata = batches[0].metadata
    return combined


def _first(value: Any, num: int) -> Any:
    return None if value is None else value[:num]


def _joined(values: list[Any]) -> Any:
    import torch

    if values[0] is None:
        return None
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values)
    return type(values[0])([value[i] for value in values for i in range(len(value))])


def _ones(rows: torch.Tensor) -> torch.Tensor:
    return rows.fill_(1)


def _first_token(rows: torch.Tensor) -> torch.Tensor:
    """One token: attention without any divides by zero."""
    rows[:, 0] = 1
    return rows


def _distinct_experts(rows: torch.Tensor) -> torch.Tensor:
    """Experts 0, 1, ... of each token: a router takes no expert twice."""
    import torch

    return rows + torch.arange(rows.shape[-1], dtype=rows.dtype, device=rows.device)


_FILL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention_mask": _first_token,
    "response_mask": _ones,
    "router_padding_mask": _ones,
    "rollout_expert_indices": _distinct_experts,
}
