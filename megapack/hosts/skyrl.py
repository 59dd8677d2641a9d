"""SkyRL: token-based micro-batches of `worker_utils`, and `bin_packing.make_seq_packer`.

Token-based micro-batches are planned by megapack. With a layout configured, alignment counts
against the budget, micro-batches are ordered for the pipeline, and every M is one that the
interleaved schedule runs; SkyRL does not check that. Written for SkyRL's commit a956457 and for
0.4.0, whose batches have packed fields.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.base.arrays import Ints
from megapack.cost.model import CostModel
from megapack.errors import ConfigError, DataError
from megapack.hosts.shared import bin_packers
from megapack.hosts.shared.families import family_parts, real_tokens
from megapack.hosts.shared.options import HostOptions, shares_prefixes
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
from megapack.layout import Layout

if TYPE_CHECKING:
    import torch

__all__ = [
    "SkyRLOptions",
    "TokenBasedBatchIterator",
    "configure",
    "make_seq_packer",
]

_RULES: dict[str, bin_packers.Rule] = {
    "FIRST_FIT_DECREASING": bin_packers.first_fit_decreasing,
    "BALANCED": bin_packers.least_loaded,
}
_HOST_MODULE = "skyrl.train.dataset.bin_packing"
_HOST_CLASSES = {"FIRST_FIT_DECREASING": "FirstFitDecreasing", "BALANCED": "Balanced"}


@dataclass(frozen=True, kw_only=True)
class SkyRLOptions:
    """Where the replacements may differ from SkyRL's own behaviour."""

    layout: Layout | None = None
    """The job's layout: rows are planned and ordered for its pipeline, alignment counts against the
    budget, and M is a count that Megatron runs. None: the fewest micro-batches within the budget,
    without regard to the pipeline."""
    cost: CostModel | None = None
    """Seconds of a micro-batch, for planning with a layout; None counts its tokens and 256 more."""
    uniform_micro_batch_size: bool = False
    """Add padding samples so that a rank's micro-batches have the same number of samples, which
    Megatron's schedules require of batches that are not packed."""
    share_prefixes: bool = field(default_factory=shares_prefixes)
    """A rank's samples with common beginnings are packed into one micro-batch, in which
    `megatron_core` lets them share these. The budget counts every copy."""

    def __post_init__(self) -> None:
        if self.cost is not None and self.layout is None:
            raise ConfigError("cost is used with a layout only; set both")


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
        self._micro_batch_size = max(map(len, rows)) if options.uniform_micro_batch_size else 0

    def __len__(self) -> int:
        return len(self._microbatches) + self._num_padding_microbatches

    def __iter__(self) -> Iterator[Any]:
        for row in self._microbatches:
            yield self._fill_up(_select(self.data, row))
        for _ in range(self._num_padding_microbatches):
            yield self._fill_up(self._create_padding_microbatch())

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
        """One sample without a loss, as wide as the real ones."""
        return _padding_samples(self.data, 1)

    def _fill_up(self, batch: Any) -> Any:
        """Append padding samples up to the uniform micro-batch size, if one is set."""
        missing = self._micro_batch_size - len(batch["sequences"])
        if missing <= 0:
            return batch
        return _append(batch, _padding_samples(self.data, missing, like=batch))


def make_seq_packer(
    algorithm: enum.Enum | str,
    bin_capacity: int,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> bin_packers.SequencePacker:
    """Make a packer by name or by the host's enum member.

    "first_fit_decreasing" refuses a sequence over the capacity; "balanced" fills the emptiest bin
    and puts such a sequence alone into a bin. If more bins are required, the heaviest are split.

    Returns:
        a packer; where SkyRL is loaded, an instance of its class for the algorithm too.

    Raises:
        ConfigError: an unknown name, or a number out of range.
    """
    name, rule = bin_packers.find_rule(algorithm, _RULES)
    packer_class = bin_packers.class_for_host(
        bin_packers.SequencePacker, _HOST_MODULE, _HOST_CLASSES[name]
    )
    return packer_class(
        rule, bin_capacity, min_bin_count, bin_count_multiple, oversize_alone=name == "BALANCED"
    )


class _RankRows:
    """This rank's samples and their micro-batches."""

    def __init__(self, data: Any, max_tokens: int, options: SkyRLOptions) -> None:
        self.lengths: Ints = np.array(_real_tokens(data), dtype=np.int64)
        if not self.lengths.size:
            raise DataError("a rank has no samples; give every rank one or more")
        parts = None
        if options.share_prefixes:
            token_ids = real_tokens(data["sequences"], data["attention_mask"])
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


def _padding_samples(data: Any, num: int, *, like: Any = None) -> Any:
    """Samples without a loss, as wide as those of `data`; attention sees one token of each.

    Args:
        like: the batch that they are appended to. Their response masks are 0, so that its means
            over responses leave them out; fields of tensors of unequal shapes repeat its first one.
            None: they are a separate batch. Their response masks are 1, so that no mean divides by
            zero, and it has no fields of tensors of unequal shapes.
    """
    import torch

    fields: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            zeros = value.new_zeros((num, *value.shape[1:]))
            is_filled = name in _FILL and (like is None or name != "response_mask")
            fields[name] = _FILL[name](zeros) if is_filled else zeros
        elif value is None:
            fields[name] = None
        elif _is_packed(value):
            fields[name] = collect(type(value), [_packed_padding(name, value)] * num)
        elif like is not None:
            fields[name] = type(value)([like[name][0]] * num)
    batch = type(data)(fields)
    batch.metadata = {**(data.metadata or {}), "is_padding_batch": True}
    return batch


def _is_packed(value: Any) -> bool:
    return hasattr(type(value), "from_segments")


def _packed_padding(name: str, field: Any) -> torch.Tensor:
    """Rows of one padding sample: of its one token, or of its response, which has none."""
    if name not in _PACKED_ROWS:
        raise DataError(
            f"padding samples have no value for the packed field {name}; known are "
            f"{', '.join(_PACKED_ROWS)}"
        )
    zeros: torch.Tensor = field.values.new_zeros((_PACKED_ROWS[name], *field.values.shape[1:]))
    return _FILL[name](zeros) if name in _FILL else zeros


def _append(first: Any, second: Any) -> Any:
    """The samples of both batches, with the fields and the metadata of the first."""
    batch = type(first)({name: _concat([value, second[name]]) for name, value in first.items()})
    batch.metadata = first.metadata
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


def _ones(zeros: torch.Tensor) -> torch.Tensor:
    return zeros.fill_(1)


def _first_token(zeros: torch.Tensor) -> torch.Tensor:
    """A mask of the first token: attention over no token would divide by zero."""
    zeros[:, 0] = 1
    return zeros


def _distinct_experts(zeros: torch.Tensor) -> torch.Tensor:
    """Experts 0, 1, ... for each token: a router never selects an expert twice for one token."""
    import torch

    return zeros + torch.arange(zeros.shape[-1], dtype=zeros.dtype, device=zeros.device)


_FILL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention_mask": _first_token,
    "response_mask": _ones,
    "router_padding_mask": _ones,
    "rollout_expert_indices": _distinct_experts,
}

# Packed field -> rows of a padding sample.
_PACKED_ROWS = {"rollout_expert_indices": 1, "rollout_sample_support": 0}
