"""`pack_row`: the samples of a micro-batch as one row. Shape suffixes: see `packed`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megapack.base.arrays import Ints
from megapack.errors import DataError, brief
from megapack.images import ImageRef, positions
from megapack.layout import Layout
from megapack.plan.plan import MicroBatch
from megapack.prefixes import Branch, PrefixTable, dummy_spans, row_branches, sequences
from megapack.rows.chain import has_piece, row_piece, sample_spans
from megapack.rows.packed import PackedRow, RowLosses, RowTokens
from megapack.samples import SampleBatch


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
    adapter_ids: Sequence[int | str] | None = None,
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
        adapter_ids: those of the plan; None: all samples have one adapter, or none.

    Raises:
        DataError: the samples differ in length from the plan, share positions although their tokens
            (those further ahead too) or images differ, or have a token id outside the model's
            vocabulary (on a GPU the embedding lookup would end the process); or a sample in pieces
            has tensors.
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
    joined = sequences(branches)
    spans = [sequence.tokens for sequence in joined]
    held = sum(spans)
    tail = micro_batch.row_tokens - held
    if tail < 0:
        raise DataError(
            f"samples {samples} need {held} padded tokens, the plan's row holds "
            f"{micro_batch.row_tokens}; pack with the layout and the prefixes of the plan"
        )
    spans += dummy_spans(tail, layout.sample_alignment)
    position_ids_T = row_position_ids(joined, spans)
    max_seqlen = int(position_ids_T.max()) + 1
    segments = np.cumsum([0, *spans], dtype=np.int32)
    weights = [1.0 if sample_weights is None else float(sample_weights[i]) for i in samples]
    writer = _RowWriter(batch, samples, weights, branches, micro_batch.row_tokens)
    if vocab_size is not None:
        writer.check_ids(vocab_size)
    names = batch.field_names if field_names is None else field_names
    end_positions_E, end_samples_E = writer.last_tokens()
    images = held_images(batch, micro_batch)
    # A piece after an image has none, but its positions follow from it.
    has_images = any(map(batch.images, samples))
    named = [] if adapter_ids is None else [adapter_ids[i] for i in samples]
    adapters = tuple(dict.fromkeys(named))
    own = [adapters.index(named[part.samples[0]]) for part in joined if named] or [0]
    own += own[-1:] * (len(spans) - len(own))
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
        images=images,
        adapters=adapters,
        adapters_T=None if adapter_ids is None else torch.from_numpy(np.repeat(own, spans)),
        features_T=writer.features(images) if has_images else None,
        rotary_T3=writer.rotary() if has_images else None,
    )


def held_images(batch: SampleBatch, micro_batch: MicroBatch) -> tuple[ImageRef, ...]:
    """The different images of which a row holds tokens, in the order of its samples."""
    found: dict[str, ImageRef] = {}
    lengths = [batch.length(i) for i in micro_batch.samples]
    parts = sample_spans(micro_batch, lengths)
    for sample, (begin, end) in zip(micro_batch.samples, parts, strict=True):
        for ref in batch.images(sample):
            if ref.offset < end and begin < ref.end:
                found.setdefault(ref.key, ref)
    return tuple(found.values())


def row_position_ids(branches: Sequence[Branch], padded_lengths: Sequence[int]) -> Tensor:
    """int64: the position of each token of a whole row in its samples; dummies begin at 0.

    Args:
        branches: its sequences.
        padded_lengths: tokens of each of them, then of each dummy.
    """
    offsets = [branch.offset for branch in branches]
    offsets += [0] * (len(padded_lengths) - len(offsets))
    starts = list(itertools.accumulate(padded_lengths, initial=0))
    before = np.subtract(offsets, starts[:-1])
    return torch.from_numpy(np.arange(starts[-1]) + np.repeat(before, padded_lengths))


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

    def features(self, images: Sequence[ImageRef]) -> Tensor:
        """`PackedRow.features_T`."""
        ends = itertools.accumulate((ref.tokens for ref in images), initial=0)
        first = dict(zip((ref.key for ref in images), ends, strict=False))
        features_N = np.full(self.ids_N.size, -1)
        for sample, start in zip(self.samples, self.starts, strict=True):
            for ref in self.batch.images(sample):
                here = slice(start + ref.offset, start + ref.end)
                ids = self.ids_N[here]
                if (ids != ids[0]).any():
                    raise DataError(
                        f"sample {sample}: the image at token {ref.offset} stands at the ids "
                        f"{brief(ids.tolist())}; give the index of its first image token, and one "
                        f"image token for each of its {ref.tokens} features"
                    )
                if ref.key in first:
                    features_N[here] = first[ref.key] + np.arange(ref.tokens)
        out_T = np.full(self.row_tokens, -1)
        values = features_N[self.is_held_N]
        out_T[self.positions] = values
        if self.is_shared and not np.array_equal(out_T[self.positions], values):
            raise DataError(
                f"samples of {self.samples} share tokens in the plan and have different images "
                "there; make the prefixes with SharedPrefixes.from_samples(tokens, images=...)"
            )
        return torch.from_numpy(out_T)

    def rotary(self) -> Tensor:
        """`PackedRow.rotary_T3`; 0 at padding."""
        pairs = zip(self.samples, self.lengths.tolist(), strict=True)
        each = [positions(self.batch.images(sample), length) for sample, length in pairs]
        out_T3 = np.zeros((self.row_tokens, 3), dtype=np.int64)
        out_T3[self.positions] = np.concatenate(each)[self.is_held_N]
        return torch.from_numpy(out_T3)

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
        is_known_N = self.is_held_N & (self.left_N >= depth)
        positions, values = self.positions_N[is_known_N], values_N[is_known_N]
        out_T = np.zeros(self.row_tokens, dtype=np.int64)
        out_T[positions] = values
        if self.is_shared and not np.array_equal(out_T[positions], values):
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
            for other in others:
                end = min(end, self.lengths[first], self.lengths[other])
                both = (self.batch.tokens(self.samples[k])[:end] for k in (first, other))
                differs = torch.ne(*both)
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
