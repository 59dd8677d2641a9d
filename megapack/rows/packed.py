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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megapack.images import ImageRef
from megapack.prefixes import Branch
from megapack.rows.chain import Link, Piece
from megapack.rows.transfer import moved
from megapack.samples import RowTensor


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
    """int32: where each sequence begins, with alignment padding; the last is the row's length."""
    padded_lengths: tuple[int, ...] = field(metadata={"moves": False})
    """Tokens of each sequence (see `prefixes.sequences`) with its alignment padding, dummies
    included; they sum to the row."""
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
    images: tuple[ImageRef, ...] = field(default=(), metadata={"moves": False})
    """The different images of the row's samples, in the order of their features."""
    features_T: Tensor | None = field(default=None, metadata={"moves": False})
    """int64, on the host: of each position the feature that stands there, -1 for text; None: no
    sample of the row has images. Those of an image are one after the other."""
    adapters: tuple[int | str, ...] = ()
    """The different adapters of its samples, in row order."""
    adapters_T: Tensor | None = None
    """int64: the index of each position's adapter in `adapters`; None: the plan has no
    `adapter_ids`. Padding counts as the sample before it."""
    rotary_T3: Tensor | None = None
    """int64: the three positions of each position's token, see `images.positions`."""
    routing: RoutingRow | None = None
    """The row as this rank's routers see it; None for a model without experts."""

    @property
    def num_slices(self) -> int:
        """Ranks that the row is cut over; 1 for a whole row."""
        return self.row_tokens // self.tokens_T.numel()

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


def unpack_row(row: PackedRow, values_R: Tensor) -> list[Tensor]:
    """Per-token values of each sample from values of a row's losses; 0 at all other tokens.

    Args:
        row: the packed row, or a slice of it, whose values are 0 at the other slices' losses.
        values_R: one value per loss, about its label (such as a log-prob).

    Returns:
        For each sample of `row.samples` a tensor of its real length, a view of one tensor. Tokens
        of a sample's other pieces are 0 too.

    >>> from megapack import Layout, MicroBatch
    >>> from megapack.rows.packing import pack_row
    >>> from megapack.samples import SampleBatch
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
