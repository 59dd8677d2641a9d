"""Samples <-> packed THD rows.

    SampleBatch + Plan -> PackedRow (one per micro-batch) -> values of its losses -> per sample

A row holds the branches of a micro-batch's samples one after the other; `cu_seqlens` says where
each begins. A branch is a whole sample, or a part of one that shares its beginning with others (see
`prefixes`). The position of token t predicts token t + 1, its label. A loss belongs to one sample
and one label: where samples share a position, it has a loss for each of them.

A row may have pieces of samples: branches that start at an offset, or end early. The label of a
piece's last position is the first token of the next piece. N counts all tokens of such a sample; so
what rows of its pieces have is added up to the whole sample.

Shape suffixes: T row tokens, t tokens of the row that this rank's routers see, S1 branches (dummies
included) plus one, n and S real samples, N tokens of all samples, one sample after the other, O
those of them that this rank's routers see, P pairs of branches and samples, J branches, R losses, U
distinct positions of losses, E sample ends, L MoE layers of the whole model, K experts per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megapack.base.arrays import Ints
from megapack.errors import DataError
from megapack.layout import Layout
from megapack.plan.plan import MicroBatch
from megapack.prefixes import Branch, PrefixTable, dummy_spans, row_branches
from megapack.rows.chain import Link, Piece, has_piece, row_piece, sample_spans
from megapack.rows.transfer import moved
from megapack.samples import RowTensor, SampleBatch


@dataclass(frozen=True, kw_only=True)
class RoutingRow:
    """A packed row as the routers of one rank see it; made by `model.experts.rows.routing_row`."""

    samples: tuple[int, ...]
    """Sample indices of the plan."""
    lengths_S: Tensor
    """float32: real tokens of each sample."""
    num_branches: int
    """J."""
    branches_t: Tensor
    """int64: index of each token's branch, J for padding."""
    copies_t: Tensor
    """int64: number of samples that each token belongs to; 0 for padding."""
    branch_of_P: Tensor
    """int64: the branch of each pair of a branch and a sample that it belongs to."""
    sample_of_P: Tensor
    """int64: the sample of each pair."""
    tokens_O: Tensor = field(metadata={"moves": False})
    """int64, on the host: for each real token of each sample that is on this rank, its index t."""
    samples_O: Tensor = field(metadata={"moves": False})
    """int64, on the host: its sample."""
    offsets_O: Tensor = field(metadata={"moves": False})
    """int64, on the host: its position in its sample."""
    choices_tLK: Tensor | None = None
    """Experts that replace the router's own choice; None: the router chooses."""
    groups: tuple[Any, ...] = field(default=(), metadata={"moves": False})
    """Groups of ranks that hold the other tokens of a `PlacedRow`."""
    link: Link | None = field(default=None, metadata={"moves": False})
    """That of a `PlacedRow`."""
    recorded: dict[int, Tensor] = field(default_factory=dict, metadata={"moves": False})
    """MoE layer -> [t, K] chosen experts, filled in a pass that records routing; the row on the
    device shares it."""


@dataclass(frozen=True, kw_only=True)
class RowLosses:
    """The losses of a row, sample after sample."""

    positions_R: Tensor
    """Index of each loss's position. A shared position with a loss is there once per sample."""
    label_index_R: Tensor
    """int64: index of each loss's label among the samples' N tokens."""
    sample_of_R: Tensor
    """int64: index of each loss's sample among the row's samples."""
    weights_R: Tensor
    """float32: weight of each loss in the step; none is 0."""
    fields: Mapping[str, Tensor]
    """The value of each field at each loss's label, [R]; per-sample fields are repeated."""
    head_positions_U: Tensor
    """The distinct positions of losses: log-probs are computed for these."""
    head_index_R: Tensor | None
    """int64: index of each loss's position in `head_positions_U`; None if both are the same."""

    @classmethod
    def at(cls, positions_R: Tensor, *, may_repeat: bool, **others: Any) -> RowLosses:
        """The losses at these positions, with the distinct ones.

        Computed on the host: on the device, the number of distinct positions would be waited for.

        Args:
            may_repeat: samples may share a position with a loss.
            others: the other attributes.
        """
        head_positions_U = positions_R
        head_index_R = None
        if may_repeat:
            unique_U, index_R = positions_R.unique(return_inverse=True)
            if unique_U.numel() < positions_R.numel():
                head_positions_U = unique_U
                head_index_R = index_R
        return cls(
            positions_R=positions_R,
            head_positions_U=head_positions_U,
            head_index_R=head_index_R,
            **others,
        )

    def kept(self, index_T: Tensor) -> RowLosses:
        """Those at positions that a slice of the row has.

        Args:
            index_T: where each position of the row is in the slice; -1 if it is not.
        """
        positions_R = index_T[self.positions_R]
        held_R = positions_R >= 0
        return RowLosses.at(
            positions_R[held_R],
            may_repeat=self.head_index_R is not None,
            label_index_R=self.label_index_R[held_R],
            sample_of_R=self.sample_of_R[held_R],
            weights_R=self.weights_R[held_R],
            fields={name: values_R[held_R] for name, values_R in self.fields.items()},
        )


@dataclass(frozen=True, kw_only=True)
class RowTokens:
    """What a model reads of a row, and what its head predicts."""

    tokens_T: Tensor
    position_ids_T: Tensor
    labels_T: Tensor
    losses: RowLosses


@dataclass(frozen=True, kw_only=True)
class PackedRow(RowTokens):
    """One micro-batch as a packed row: whole, or one context-parallel rank's slice of it.

    `slices.slice_row` slices the tensors named `*_T`, and keeps the losses and ends whose positions
    are in the slice; the other attributes describe the whole row.

    With samples [5, 6, 7] and [8, 9], cp=1 and a row of 6 tokens:

        tokens_T             5 6 7 8 9 0
        position_ids_T       0 1 2 0 1 0
        labels_T             6 7 0 9 0 0
        branch_of_T          0 0 0 1 1 -1
        positions_N          0 1 2 3 4
        losses.positions_R   0 1 3
        losses.label_index_R 1 2 4
        losses.sample_of_R   0 0 1
        end_positions_E      2 4
        cu_seqlens_S1        0 3 5 6

    With samples [5, 6, 7] and [5, 6, 8], which share a position, and a row of 5 tokens:

        tokens_T             5 6 7 6 8
        position_ids_T       0 1 2 1 2
        labels_T             6 7 0 8 0
        branch_of_T          0 1 1 2 2
        positions_N          0 1 2 0 3 4
        losses.positions_R   0 1 0 3
        losses.label_index_R 1 2 4 5
        losses.sample_of_R   0 0 1 1
        end_positions_E      2 4
        cu_seqlens_S1        0 1 3 5

    With the piece (2, 4) of the sample [1, 2, 3, 4], and a row of 2 tokens:

        tokens_T             3 4
        position_ids_T       2 3
        labels_T             4 0
        branch_of_T          0 0
        positions_N          -1 -1 0 1
        losses.positions_R   0
        losses.label_index_R 3
        losses.sample_of_R   0
        end_positions_E      1
        cu_seqlens_S1        0 2
    """

    samples: tuple[int, ...] = field(metadata={"moves": False})
    """Sample indices of the plan, in the order of the plan; () for a padding micro-batch."""
    lengths: tuple[int, ...] = field(metadata={"moves": False})
    """Real tokens of each sample, of a piece those of the whole sample."""
    branches: tuple[Branch, ...] = field(metadata={"moves": False})
    """Where the samples are in the row; `Branch.samples` are indices into `samples`."""
    positions_N: Tensor = field(metadata={"moves": False})
    """int64, on the host: the position of each token of each sample; -1 if the row has only a piece
    without it."""
    branch_of_T: Tensor
    """int64: index of each real token's branch; -1 at padding."""
    end_positions_E: Tensor
    """Indices of the positions that hold a sample's last real token."""
    end_samples_E: Tensor
    """int64: index of the sample of each."""
    set_of_n: Tensor
    """int64 [n]: index of each sample's colocated set among the row's sets."""
    cu_seqlens_S1: Tensor
    """int32: where each branch begins, with alignment padding; the last is the row's length."""
    padded_lengths: tuple[int, ...] = field(metadata={"moves": False})
    """Tokens of each branch with its alignment padding, dummies included; they sum to the row."""
    max_seqlen: int
    """Tokens of the longest sample, with its alignment padding."""
    row_tokens: int
    """The whole row's length."""
    row_positions_T: Tensor
    """int64: index of each position in the whole row."""
    sample_fields: Mapping[str, Tensor]
    """The fields with one number per sample, once more as [n]."""
    piece: Piece | None
    """The pieces of samples that the row has; None if all its samples are whole."""
    tensors: Mapping[str, RowTensor]
    """The samples' `TensorField`s; whole on every context-parallel rank."""
    ahead: tuple[RowTokens, ...]
    """The row's tokens and losses further ahead, one per depth of multi-token prediction: at depth
    k (1, 2, ...) the tokens k positions ahead in the same sample, and the token after each as its
    label; 0 after the end of a sample."""
    routing: RoutingRow | None = None
    """The row as this rank's routers see it; None for a model without experts."""

    @property
    def num_slices(self) -> int:
        """Ranks that the row is cut over; 1 for a whole row."""
        return self.row_tokens // self.tokens_T.numel()

    @property
    def num_shared(self) -> int:
        """Positions that the row saves because samples share them."""
        return sum(branch.tokens * (len(branch.samples) - 1) for branch in self.branches)

    def to(self, device: torch.device | str) -> PackedRow:
        """The same row with its tensors on `device`; see `transfer`."""
        return moved(self, device)


@dataclass(frozen=True, kw_only=True)
class PlacedRow(PackedRow):
    """A row on its device, with what one pass runs it with."""

    params: Any
    """Megatron's PackedSeqParams, which all model chunks get (`model.attention.packed`)."""
    cp_group: Any = None
    """The ranks that hold the row's slices; None: this one has the whole row."""
    link: Link | None = None
    """The row's place in its chain; None for a row of whole samples."""

    @classmethod
    def of(cls, row: PackedRow, **others: Any) -> PlacedRow:
        """A row on its device with the other attributes."""
        return cls(**{**vars(row), **others})


def pack_row(
    batch: SampleBatch,
    micro_batch: MicroBatch,
    layout: Layout,
    sample_weights: Sequence[float] | None = None,
    field_names: Sequence[str] | None = None,
    colocate_ids: Sequence[int | str] | None = None,
    vocab_size: int | None = None,
    prefixes: PrefixTable | None = None,
    num_ahead: int = 0,
) -> PackedRow:
    """Pack the samples of a micro-batch into one row of `micro_batch.row_tokens` tokens.

    The row is whole: where several DP ranks share it, each packs it and takes its slice.

    Args:
        batch: the samples that were planned; those of this micro-batch must have their tokens.
        micro_batch: one of the plan's step; without samples it becomes a row of dummies.
        layout: that of the plan; with the micro-batch's width it sets the alignment of samples.
        sample_weights: weight of one response token, per sample of the batch (see
            `loss.sample_weights`); None: every response token has weight 1.
        field_names: fields to put into the row; None for all.
        colocate_ids: those of the plan; None: each sample is a set by itself.
        vocab_size: token ids must be smaller; None: not checked.
        prefixes: those of the plan; None: samples share nothing.
        num_ahead: depths of multi-token prediction.

    Raises:
        DataError: the samples differ in length from the plan, share positions although their tokens
            differ (those further ahead too), or have a token id outside the model's vocabulary (on
            a GPU the embedding lookup would end the process); or a sample in pieces has tensors.
    """
    samples = micro_batch.samples
    lengths = tuple(batch.length(i) for i in samples)
    parts = sample_spans(micro_batch, lengths)
    held_lengths = [end - begin for begin, end in parts]
    if sum(held_lengths) != micro_batch.tokens or any(
        end > length for (_, end), length in zip(parts, lengths, strict=True)
    ):
        raise DataError(
            f"samples {samples} hold {sum(held_lengths)} tokens, the plan counts "
            f"{micro_batch.tokens}; plan with the lengths of this batch"
        )
    if has_piece(micro_batch) and batch.tensor_names:
        raise DataError(
            f"sample {micro_batch.pieces[0].sample} is in pieces, and the batch has the tensor "
            f"{batch.tensor_names[0]!r}, which is not cut; plan with Policy(split_samples='off')"
        )
    layout = layout.over(micro_batch.width)
    table = None if prefixes is None else prefixes.over(micro_batch.width)
    branches = row_branches(samples, lengths, layout, table, micro_batch.pieces)
    held = sum(branch.tokens for branch in branches)
    tail = micro_batch.row_tokens - held
    if tail < 0:
        raise DataError(
            f"samples {samples} need {held} padded tokens, the plan's row holds "
            f"{micro_batch.row_tokens}; pack with the layout and the prefixes of the plan"
        )
    spans = [branch.tokens for branch in branches]
    spans += dummy_spans(tail, layout.sample_alignment)
    position_ids_T = row_position_ids(branches, spans)
    max_seqlen = int(position_ids_T.max()) + 1
    segments = np.cumsum([0, *spans], dtype=np.int32)
    weights = [1.0 if sample_weights is None else float(sample_weights[i]) for i in samples]
    writer = _RowWriter(batch, samples, weights, branches, micro_batch.row_tokens)
    if vocab_size is not None:
        writer.check_ids(vocab_size)
    names = batch.field_names if field_names is None else field_names
    end_positions_E, end_samples_E = writer.last_tokens()
    return PackedRow(
        samples=samples,
        lengths=lengths,
        branches=tuple(branches),
        positions_N=torch.from_numpy(writer.positions_N),
        tokens_T=writer.tokens(0),
        position_ids_T=position_ids_T,
        labels_T=writer.tokens(1),
        branch_of_T=writer.branch_of(),
        losses=writer.losses(0, names),
        end_positions_E=end_positions_E,
        end_samples_E=end_samples_E,
        set_of_n=_sets(samples, colocate_ids),
        cu_seqlens_S1=torch.from_numpy(segments),
        padded_lengths=tuple(spans),
        max_seqlen=max_seqlen,
        row_tokens=micro_batch.row_tokens,
        row_positions_T=torch.arange(micro_batch.row_tokens),
        sample_fields={
            name: writer.per_sample(name) for name in names if writer.is_per_sample(name)
        },
        piece=row_piece(micro_batch, lengths, branches),
        tensors=batch.row_tensors(samples, _trees(branches)),
        ahead=tuple(writer.ahead(depth) for depth in range(1, num_ahead + 1)),
    )


def row_position_ids(branches: Sequence[Branch], padded_lengths: Sequence[int]) -> Tensor:
    """int64: the position of each token of a whole row in its samples; dummies begin at 0.

    Args:
        padded_lengths: tokens of each branch, then of each dummy.
    """
    offsets = [branch.offset for branch in branches]
    offsets += [0] * (len(padded_lengths) - len(offsets))
    starts = list(itertools.accumulate(padded_lengths, initial=0))
    before = np.subtract(offsets, starts[:-1])
    return torch.from_numpy(np.arange(starts[-1]) + np.repeat(before, padded_lengths))


def unpack_row(row: PackedRow, values_R: Tensor) -> list[Tensor]:
    """Per-token values of each sample from values of a row's losses; 0 at all other tokens.

    Args:
        row: the packed row, or a slice of it, whose values are 0 at the other slices' losses.
        values_R: one value per loss, about its label (such as a log-prob).

    Returns:
        For each sample of `row.samples` a tensor of its real length, a view of one tensor. Tokens
        of a sample's other pieces are 0 too.

    >>> from megapack import Layout, MicroBatch
    >>> batch = SampleBatch([[5, 6, 7], [8, 9]])
    >>> micro_batch = MicroBatch((0, 1), row_tokens=6, tokens=5, tokens_sq=13, padded_tokens=5)
    >>> row = pack_row(batch, micro_batch, Layout())
    >>> unpack_row(row, torch.tensor([10, 11, 13]))
    [tensor([ 0, 10, 11]), tensor([ 0, 13])]
    """
    values_N = values_R.new_zeros(sum(row.lengths))
    values_N[row.losses.label_index_R] = values_R
    # Views: a kernel per sample would cost more than the values.
    return list(torch.split(values_N, list(row.lengths))) if row.lengths else []


class _RowWriter:
    """Writes one quantity after the other of a micro-batch's samples into row tensors.

    Depth 0 is the row itself, depth k what is k tokens further ahead in the same sample. It works
    on numpy's arrays: on these few numbers, an operation of torch's takes several times as long.
    """

    def __init__(
        self,
        batch: SampleBatch,
        samples: tuple[int, ...],
        weights: Sequence[float],
        branches: Sequence[Branch],
        row_tokens: int,
    ) -> None:
        self.batch = batch
        self.samples = samples
        self.weights = weights
        self.branches = branches
        self.row_tokens = row_tokens
        self.is_shared = any(len(branch.samples) > 1 for branch in branches)
        self.lengths = np.array([batch.length(i) for i in samples], dtype=np.int64)
        self.starts = self.lengths.cumsum() - self.lengths
        """Of each sample, among the N tokens."""
        index_N = np.arange(self.lengths.sum())
        self.positions_N = self._positions(index_N.size)
        self.is_held_N = self.positions_N >= 0
        self.positions = self.positions_N[self.is_held_N]
        """Those that the row has."""
        self.ids_N: Ints = _joined([batch.tokens(i) for i in samples], torch.int64).numpy()
        self.sample_of_N = np.repeat(np.arange(len(samples)), self.lengths)
        self.offset_N = index_N - self.starts[self.sample_of_N]
        """Tokens of the sample before each one."""
        self.left_N = self.lengths[self.sample_of_N] - 1 - self.offset_N
        """Tokens of the sample after each one."""

    def _positions(self, num_tokens: int) -> Ints:
        positions_N = np.full(num_tokens, -1)
        for branch in self.branches:
            for k in branch.samples:
                begin = self.starts[k] + branch.offset
                end = min(begin + branch.tokens, self.starts[k] + self.lengths[k])
                positions_N[begin:end] = np.arange(branch.start, branch.start + end - begin)
        return positions_N

    def check_ids(self, vocab_size: int) -> None:
        """Raise DataError if a token id is outside of the model's vocabulary."""
        is_outside_N = self.ids_N >= vocab_size
        if is_outside_N.any():
            token = is_outside_N.argmax()
            raise DataError(
                f"sample {self.samples[self.sample_of_N[token]]} has the token id "
                f"{self.ids_N[token]}, the model's vocabulary is {vocab_size}; give ids of the "
                "model's tokenizer"
            )

    def ahead(self, depth: int) -> RowTokens:
        """The row at a depth of multi-token prediction."""
        return RowTokens(
            tokens_T=self.tokens(depth),
            position_ids_T=self._written(self.offset_N + depth, depth),
            labels_T=self.tokens(depth + 1),
            losses=self.losses(depth, ()),
        )

    def tokens(self, depth: int) -> Tensor:
        """Token ids, [T]; at depth 1 they are the labels."""
        return self._written(np.roll(self.ids_N, -depth), depth)

    def _written(self, values_N: Ints, depth: int) -> Tensor:
        """The values at the row's positions, [T]; 0 where no token is so far ahead."""
        if depth:
            values_N = np.where(self.left_N >= depth, values_N, 0)
        values = values_N[self.is_held_N]
        out_T = np.zeros(self.row_tokens, dtype=np.int64)
        out_T[self.positions] = values
        if self.is_shared and not np.array_equal(out_T[self.positions], values):
            raise self._differing(depth)
        return torch.from_numpy(out_T)

    def _differing(self, depth: int) -> DataError:
        """An error that names two samples that share positions although their tokens differ."""
        if depth > 1:
            return DataError(
                f"samples of {self.samples} share positions that predict different tokens {depth} "
                "tokens ahead; make the prefixes with mtp_num_layers of the model"
            )
        for branch in self.branches:
            first, *others = branch.samples
            # The last position's label counts too.
            end = branch.offset + branch.tokens + 1
            own = self.batch.tokens(self.samples[first])[:end]
            for other in others:
                differs = own != self.batch.tokens(self.samples[other])[:end]
                if differs.any():
                    return DataError(
                        f"samples {self.samples[first]} and {self.samples[other]} share {end} "
                        f"tokens in the plan, and differ at token {int(differs.int().argmax())}; "
                        "plan with the prefixes of this batch"
                    )
        return DataError("samples share tokens that differ; plan with the prefixes of this batch")

    def branch_of(self) -> Tensor:
        out_T = np.full(self.row_tokens, -1)
        for index, branch in enumerate(self.branches):
            tokens = min(branch.tokens, self.lengths[branch.samples[0]] - branch.offset)
            out_T[branch.start : branch.start + tokens] = index
        return torch.from_numpy(out_T)

    def last_tokens(self) -> tuple[Tensor, Tensor]:
        """Positions of the samples' last tokens that the row has, and the index of each sample."""
        is_end_N = (self.left_N == 0) & self.is_held_N
        found = self.positions_N[is_end_N], self.sample_of_N[is_end_N]
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])

    def losses(self, depth: int, names: Sequence[str]) -> RowLosses:
        """The losses of a depth, with the values of these fields."""
        mask_N = _joined([self.batch.response_mask(i) for i in self.samples], torch.bool).numpy()
        weights_N = np.array(self.weights, dtype=np.float32)[self.sample_of_N] * mask_N
        # A loss is in the row that has the position which predicts its label.
        ahead = depth + 1
        weights_N[(self.offset_N < ahead) | ~np.roll(self.is_held_N, ahead)] = 0.0
        index_R = np.flatnonzero(weights_N)
        label_index_R = torch.from_numpy(index_R)
        return RowLosses.at(
            torch.from_numpy(self.positions_N[index_R - ahead]),
            may_repeat=self.is_shared,
            label_index_R=label_index_R,
            sample_of_R=torch.from_numpy(self.sample_of_N[index_R]),
            weights_R=torch.from_numpy(weights_N[index_R]),
            fields={name: self._values(name)[label_index_R] for name in names},
        )

    def is_per_sample(self, name: str) -> bool:
        return all(self.batch.field(name, i).dim() == 0 for i in self.samples)

    def per_sample(self, name: str) -> Tensor:
        values = [self.batch.field(name, i) for i in self.samples]
        # The leading zero, cut off again, gives a row without samples its shape (0,) and dtype.
        return torch.stack([torch.zeros((), dtype=self.batch.field_dtype(name)), *values])[1:]

    def _values(self, name: str) -> Tensor:
        """A field at each token of each sample, [N]."""
        values = (self.batch.field(name, i) for i in self.samples)
        pairs = zip(values, self.lengths, strict=True)
        each = [value.expand(length) if value.dim() == 0 else value for value, length in pairs]
        return _joined(each, self.batch.field_dtype(name))


def _joined(values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The tensors one after the other; an empty one of this dtype if there are none."""
    return torch.cat([torch.zeros(0, dtype=dtype), *values])


def _trees(branches: Sequence[Branch]) -> list[tuple[int, ...]]:
    """Samples of the row that share positions, one tuple per tree; samples alone are left out."""
    roots = (branch.samples for branch in branches if branch.parent < 0)
    return [samples for samples in roots if len(samples) > 1]


def _sets(samples: tuple[int, ...], colocate_ids: Sequence[int | str] | None) -> Tensor:
    """Number the colocated sets in the order of their first sample."""
    number: dict[int | str, int] = {}
    ids = samples if colocate_ids is None else [colocate_ids[i] for i in samples]
    return torch.tensor([number.setdefault(name, len(number)) for name in ids], dtype=torch.int64)
