"""Samples <-> packed THD rows.

    SampleBatch + Plan -> PackedRow (one per micro-batch) -> values at its positions -> per sample

A row holds the samples of a micro-batch one after the other; `cu_seqlens` says where each begins.
Labels, loss weights and fields are stored at the position that predicts their token: the position
of token t holds those of token t + 1 of the same sample.

Shape suffixes: T row tokens, t tokens of the row that this rank's routers see, S1 samples (dummies
included) plus one, n and S real samples, R response positions, E sample ends, L MoE layers of the
whole model, K experts per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megapack.errors import DataError
from megapack.layout import Layout
from megapack.plan.plan import MicroBatch
from megapack.rows.transfer import moved
from megapack.samples import RowTensor, SampleBatch

# Length of the dummy samples in a row's tail, before alignment. Attention costs length^2 per
# sample: a tail of 6144 tokens costs 12 * 512^2 = 3 M as 12 dummies, 6144^2 = 38 M as one. Kernels
# start blocks for each sample up to the longest, so many short dummies (96 of 64 tokens) cost more
# than a few longer ones. Chosen by hand.
DUMMY_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class RoutingRow:
    """A packed row as the routers of one rank see it; made by `model.experts.rows.routing_row`."""

    samples: tuple[int, ...]
    """Sample indices of the plan."""
    samples_t: Tensor
    """int64: index in `samples` of each token's sample; len(samples) for padding."""
    offsets_t: Tensor
    """int64: position of each real token in its sample."""
    lengths_S: Tensor
    """float32: real tokens of each sample."""
    choices_tLK: Tensor | None = None
    """Experts that replace the router's own choice; None: the router chooses."""
    recorded: dict[int, Tensor] = field(default_factory=dict, metadata={"moves": False})
    """MoE layer -> [t, K] chosen experts, filled in a pass that records routing; the row on the
    device shares it."""

    @property
    def real_t(self) -> Tensor:
        """bool: False at padding."""
        return self.samples_t < len(self.samples)


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """One micro-batch as a packed row: whole, or one context-parallel rank's slice of it.

    `slices.slice_row` slices the tensors named `*_T` and the fields; the other attributes describe
    the whole row.

    With samples [5, 6, 7] and [8, 9], cp=1 and a row of 6 tokens:

        tokens_T             5 6 7 8 9 0
        position_ids_T       0 1 2 0 1 0
        labels_T             6 7 0 9 0 0
        sample_of_T          0 0 0 1 1 -1
        end_positions_E      2 4
        cu_seqlens_S1        0 3 5 5        (real tokens; a dummy has none)
        cu_seqlens_padded_S1 0 3 5 6        (what attention uses)
    """

    samples: tuple[int, ...]
    """Sample indices of the plan, in row order; () for a padding micro-batch."""
    lengths: tuple[int, ...]
    """Real tokens of each sample."""
    starts: tuple[int, ...]
    """Where each sample begins in the row."""
    tokens_T: Tensor
    position_ids_T: Tensor
    labels_T: Tensor
    weights_T: Tensor
    """float32: weight of the label's loss in the step; 0 at prompts, sample ends and padding."""
    sample_of_T: Tensor
    """int64: index of each real token's sample among `samples`; -1 at padding."""
    end_positions_E: Tensor
    """Indices of the positions that hold a sample's last real token, in row order."""
    set_of_n: Tensor
    """int64 [n]: index of each sample's colocated set among the row's sets."""
    cu_seqlens_S1: Tensor
    cu_seqlens_padded_S1: Tensor
    padded_lengths: tuple[int, ...]
    """Tokens of each sample with its alignment padding, dummies included; they sum to the row."""
    max_seqlen: int
    """Tokens of the longest sample, with its alignment padding."""
    row_tokens: int
    """The whole row's length."""
    row_positions_T: Tensor
    """int64: index of each position in the whole row."""
    loss_positions_R: Tensor
    """Indices of the positions whose label counts in the loss."""
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token fields [T], at the position that predicts the token; per-sample fields are
    repeated."""
    sample_fields: Mapping[str, Tensor] = field(default_factory=dict)
    """The fields with one number per sample, once more as [n]."""
    tensors: Mapping[str, RowTensor] = field(default_factory=dict)
    """The samples' `TensorField`s; whole on every context-parallel rank."""
    ahead: tuple[PackedRow, ...] = ()
    """The same row with labels further ahead, one row per depth of multi-token prediction."""
    routing: RoutingRow | None = None
    """The row as this rank's routers see it; None for a model without experts."""
    params: Any = field(default=None, metadata={"moves": False})
    """Megatron's PackedSeqParams, set once the row is on its device (`with_params` in
    `model.attention.packed`)."""

    def to(self, device: torch.device | str) -> PackedRow:
        """The same row with its tensors on `device`; see `transfer`."""
        return moved(self, device)


def pack_row(
    batch: SampleBatch,
    micro_batch: MicroBatch,
    layout: Layout,
    sample_weights: Sequence[float] | None = None,
    field_names: Sequence[str] | None = None,
    colocate_ids: Sequence[int | str] | None = None,
    vocab_size: int | None = None,
) -> PackedRow:
    """Pack the samples of a micro-batch into one row of `micro_batch.row_tokens` tokens.

    Args:
        batch: the samples that were planned; those of this micro-batch must have their tokens.
        micro_batch: one of the plan's step; without samples it becomes a row of dummies.
        layout: sets the alignment of samples.
        sample_weights: weight of one response token, per sample of the batch (see
            `loss.sample_weights`); None: every response token has weight 1.
        field_names: fields to put into the row; None for all.
        colocate_ids: those of the plan; None: each sample is a set by itself.
        vocab_size: token ids must be smaller; None: not checked.

    Raises:
        DataError: the samples differ in length from the plan, or have a token id outside the
            model's vocabulary (on a GPU the embedding lookup would end the process).
    """
    lengths = tuple(batch.length(i) for i in micro_batch.samples)
    aligned = [layout.aligned_sample_tokens(n) for n in lengths]
    if sum(lengths) != micro_batch.tokens:
        raise DataError(
            f"samples {micro_batch.samples} hold {sum(lengths)} tokens, the plan counts "
            f"{micro_batch.tokens}; plan with the lengths of this batch"
        )
    tail = micro_batch.row_tokens - sum(aligned)
    if tail < 0:
        raise DataError(
            f"samples {micro_batch.samples} need {sum(aligned)} padded tokens, the plan's row "
            f"holds {micro_batch.row_tokens}; pack with the layout of the plan"
        )
    spans = aligned + _dummy_spans(tail, layout.sample_alignment)
    starts = tuple(itertools.accumulate(aligned, initial=0))[: len(lengths)]
    writer = _RowWriter(batch, micro_batch.samples, starts, micro_batch.row_tokens)
    names = batch.field_names if field_names is None else field_names
    weights_T = writer.weights(sample_weights)
    if vocab_size is not None:
        _check_ids(batch, micro_batch.samples, vocab_size)
    real = [*lengths, *[0] * (len(spans) - len(lengths))]
    return PackedRow(
        samples=micro_batch.samples,
        lengths=lengths,
        starts=starts,
        tokens_T=writer.tokens(),
        position_ids_T=torch.cat([torch.arange(n) for n in spans]),
        labels_T=writer.labels(),
        weights_T=weights_T,
        sample_of_T=writer.sample_of(),
        end_positions_E=writer.end_positions(),
        set_of_n=_sets(micro_batch.samples, colocate_ids),
        cu_seqlens_S1=_cumulative(real),
        cu_seqlens_padded_S1=_cumulative(spans),
        padded_lengths=tuple(spans),
        max_seqlen=max(spans),
        row_tokens=micro_batch.row_tokens,
        row_positions_T=torch.arange(micro_batch.row_tokens),
        # Computed on the host: on the device `nonzero` would wait until the count is known.
        loss_positions_R=weights_T.nonzero().squeeze(1),
        fields={name: writer.shifted(name) for name in names},
        sample_fields={
            name: writer.per_sample(name) for name in names if writer.is_per_sample(name)
        },
        tensors=batch.row_tensors(micro_batch.samples),
    )


def unpack_row(row: PackedRow, values_T: Tensor, *, fill: float = 0.0) -> list[Tensor]:
    """Per-token values of each sample from values at a row's positions; undoes the shift.

    Args:
        row: the packed row, whole or a slice of it.
        values_T: one value per position of the whole row, about the token that it predicts (such as
            a log-prob).
        fill: value of a sample's first token, which no position predicts.

    Returns:
        For each sample of `row.samples` a tensor of its real length, a view of one tensor.

    >>> from megapack import Layout, MicroBatch
    >>> batch = SampleBatch([[5, 6, 7], [8, 9]])
    >>> micro_batch = MicroBatch((0, 1), row_tokens=6, tokens=5, tokens_sq=13, padded_tokens=5)
    >>> row = pack_row(batch, micro_batch, Layout())
    >>> unpack_row(row, torch.tensor([10, 11, 12, 13, 14, 15]))
    [tensor([ 0, 10, 11]), tensor([ 0, 13])]
    """
    shifted = torch.cat([values_T.new_zeros(1), values_T])
    firsts_n = row.cu_seqlens_padded_S1[: len(row.samples)].long()
    shifted.index_fill_(0, firsts_n, fill)
    # Views: a kernel per sample would cost more than the values.
    spans = zip(row.starts, row.lengths, strict=True)
    return [shifted[start : start + length] for start, length in spans]


class _RowWriter:
    """Writes one quantity after the other of a micro-batch's samples into row tensors."""

    def __init__(
        self,
        batch: SampleBatch,
        samples: tuple[int, ...],
        starts: tuple[int, ...],
        row_tokens: int,
    ) -> None:
        self.batch = batch
        self.row_tokens = row_tokens
        self.starts = list(zip(samples, starts, strict=True))

    def tokens(self) -> Tensor:
        out_T = torch.zeros(self.row_tokens, dtype=torch.int64)
        for i, start in self.starts:
            tokens = self.batch.tokens(i)
            out_T[start : start + tokens.numel()] = tokens
        return out_T

    def labels(self) -> Tensor:
        out_T = torch.zeros(self.row_tokens, dtype=torch.int64)
        for i, start in self.starts:
            tokens = self.batch.tokens(i)
            out_T[start : start + tokens.numel() - 1] = tokens[1:]
        return out_T

    def sample_of(self) -> Tensor:
        out_T = torch.full((self.row_tokens,), -1, dtype=torch.int64)
        for index, (i, start) in enumerate(self.starts):
            out_T[start : start + self.batch.length(i)] = index
        return out_T

    def end_positions(self) -> Tensor:
        ends = [start + self.batch.length(i) - 1 for i, start in self.starts]
        return torch.tensor(ends, dtype=torch.int64)

    def is_per_sample(self, name: str) -> bool:
        return all(self.batch.field(name, i).dim() == 0 for i, _ in self.starts)

    def per_sample(self, name: str) -> Tensor:
        values = [self.batch.field(name, i) for i, _ in self.starts]
        # The leading zero, cut off again, gives a row without samples its shape (0,) and dtype.
        return torch.stack([torch.zeros((), dtype=self.batch.field_dtype(name)), *values])[1:]

    def weights(self, sample_weights: Sequence[float] | None) -> Tensor:
        out_T = torch.zeros(self.row_tokens, dtype=torch.float32)
        for i, start in self.starts:
            mask = self.batch.response_mask(i)[1:]
            weight = 1.0 if sample_weights is None else float(sample_weights[i])
            out_T[start : start + mask.numel()] = mask * weight
        return out_T

    def shifted(self, name: str) -> Tensor:
        out_T = torch.zeros(self.row_tokens, dtype=self.batch.field_dtype(name))
        for i, start in self.starts:
            value = self.batch.field(name, i)
            span = slice(start, start + self.batch.length(i) - 1)
            out_T[span] = value if value.dim() == 0 else value[1:]
        return out_T


def _check_ids(batch: SampleBatch, samples: tuple[int, ...], vocab_size: int) -> None:
    for i in samples:
        largest = int(batch.tokens(i).max())
        if largest >= vocab_size:
            raise DataError(
                f"sample {i} has the token id {largest}, the model's vocabulary is {vocab_size}; "
                "give ids of the model's tokenizer"
            )


def _sets(samples: tuple[int, ...], colocate_ids: Sequence[int | str] | None) -> Tensor:
    """Number the colocated sets in the order of their first sample."""
    number: dict[int | str, int] = {}
    ids = samples if colocate_ids is None else [colocate_ids[i] for i in samples]
    return torch.tensor([number.setdefault(name, len(number)) for name in ids], dtype=torch.int64)


def _dummy_spans(tail: int, alignment: int) -> list[int]:
    """Divide a row's tail into short dummy samples of aligned length.

    >>> _dummy_spans(1100, 1)
    [512, 512, 76]
    """
    unit = max(alignment, DUMMY_TOKENS // alignment * alignment)
    return [unit] * (tail // unit) + ([tail % unit] if tail % unit else [])


def _cumulative(spans: Sequence[int]) -> Tensor:
    return torch.tensor([0, *spans], dtype=torch.int64).cumsum(0).to(torch.int32)
