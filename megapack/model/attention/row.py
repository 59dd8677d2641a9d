"""A packed row as layers see it: what they need besides Megatron's description of the row.

Megatron passes nothing else about a row to all layers. So a `RowView` is an attribute of that
description, and keeps what the first layer computes for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megapack.errors import ScheduleError
from megapack.model.attention.paths import Paths, key_paths
from megapack.model.recurrent.segments import Segments, row_segments
from megapack.model.vision.features import RowImages
from megapack.prefixes import Branch
from megapack.rows.chain import Link
from megapack.rows.slices import assembly_order
from megapack.rows.transfer import moved


@dataclass(eq=False)
class RowView:
    """A packed row, on the device of its queries."""

    cu_seqlens_S1: Tensor
    """int32: where each sample begins, with padding; the last is the row's length."""
    max_seqlen: int
    """At least the tokens of the longest sample."""
    lengths: Sequence[int] | None = None
    """Padded tokens of each branch and dummy; None: see `padded_lengths`."""
    positions_T: Tensor | None = None
    """int64: the position of this rank's tokens in their samples; None: rotary embeddings take
    Megatron's path for packed rows (see `rotary`)."""
    branch_of_T: Tensor | None = None
    """int64: index of the branch of each of this rank's tokens; -1 at padding."""
    branch_samples: Sequence[int] = ()
    """Real tokens of the longest whole sample of each branch."""
    branches: tuple[Branch, ...] = ()
    """Those of a row whose samples share prefixes, or that has a piece; () otherwise."""
    cp_group: Any = None
    """The ranks that share the row; None: one rank has it, or the model's layers know them."""
    link: Link | None = None
    """The row's place in its chain, if it has a piece of a sample."""
    images: RowImages | None = None
    """What layers need of the row's images; None: it has none."""
    copies: tuple[int, ...] = ()
    """Number of samples that each branch belongs to."""
    latent: tuple[PackedSeqParams, Tensor] | None = None
    """Of `rotary.latent_row`, once a layer has asked for it."""
    gathered: PackedSeqParams | None = None
    """Of `te_rows.gathered_params`, once a layer has asked for it."""
    _paths: dict[tuple[int | None, int | None], Paths] = field(default_factory=dict)

    @property
    def cp(self) -> int:
        """Number of ranks that share the row."""
        return 1 if self.cp_group is None else self.cp_group.size()

    @property
    def cp_rank(self) -> int:
        """This rank among them."""
        return 0 if self.cp_group is None else self.cp_group.rank()

    @property
    def carried(self) -> tuple[int, ...]:
        """Padded tokens that each earlier row has kept; their keys come before the row's."""
        return () if self.link is None else self.link.earlier

    @cached_property
    def padded_lengths(self) -> list[int]:
        """Padded tokens of each branch and dummy; read from the device if they were not given."""
        if self.lengths is not None:
            return list(self.lengths)
        return torch.diff(self.cu_seqlens_S1).tolist()

    @cached_property
    def sample_tokens_T(self) -> Tensor:
        """int64: real tokens of the whole sample of each of this rank's tokens; 0 at padding."""
        if self.branch_of_T is None:
            raise ScheduleError("a row has no lengths of samples; describe it by packed.row_params")
        return self._of_branches(self.branch_samples)

    @cached_property
    def copies_T(self) -> Tensor | None:
        """int64: number of samples that each of this rank's tokens belongs to, 0 for padding; None
        if the row's samples are not known."""
        if self.branch_of_T is None:
            return None
        return self._of_branches(self.copies)

    def _of_branches(self, values: Sequence[int]) -> Tensor:
        """A number of each branch, for each of this rank's tokens; 0 at padding, whose index is
        -1."""
        assert self.branch_of_T is not None
        values_J = torch.tensor([*values, 0])
        return moved(values_J, self.branch_of_T.device)[self.branch_of_T]

    def paths(self, window: int | None = None, max_queries: int | None = None) -> Paths:
        """The sequences of this rank's queries, and the keys of each; see `key_paths`."""
        asked = window, max_queries
        if asked not in self._paths:
            paths = key_paths(
                self.padded_lengths,
                self.branches,
                carried=self.carried,
                cp=self.cp,
                cp_rank=self.cp_rank,
                window=window,
                max_queries=max_queries,
            )
            self._paths[asked] = moved(paths, self.cu_seqlens_S1.device)
        return self._paths[asked]

    @cached_property
    def segments(self) -> Segments:
        """The segments of the whole row, for layers that scan it."""
        kept = None
        if self.link is not None and self.link.piece.kept_tokens:
            starts = [branch.start for branch in self.branches]
            kept = starts.index(self.link.piece.start)
        return row_segments(self.padded_lengths, self.branches, kept, self.cu_seqlens_S1.device)

    @cached_property
    def whole_order_T(self) -> Tensor:
        """Index of each token of the whole row in the concatenated slices of all ranks."""
        order_T = assembly_order(self.padded_lengths, self.cp)
        return moved(order_T, self.cu_seqlens_S1.device)

    @cached_property
    def slice_order_T(self) -> Tensor:
        """The inverse: index in the whole row of each token of the concatenated slices."""
        return self.whole_order_T.argsort()


def with_view(params: PackedSeqParams, view: RowView) -> PackedSeqParams:
    """The description, which has the row's view from now on."""
    vars(params)["_megapack"] = view
    return params


def row_view(params: PackedSeqParams, cp_group: Any = None) -> RowView:
    """The row of a description; one without a view is seen as whole samples.

    Args:
        cp_group: the ranks that share a row if its view names none.
    """
    view: RowView | None = vars(params).get("_megapack")
    if view is None:
        view = RowView(params.cu_seqlens_q, params.max_seqlen_q)
        with_view(params, view)
    view.cp_group = view.cp_group or cp_group
    return view


def seen_as_one(params: PackedSeqParams, whole: PackedSeqParams) -> PackedSeqParams:
    """A description of the row as one sequence, which knows the true one."""
    vars(params)["_megapack_whole"] = whole
    return params


def whole_row(params: PackedSeqParams) -> PackedSeqParams | None:
    """The true description of a row that is seen as one sequence; None: it is not."""
    return vars(params).get("_megapack_whole") if params is not None else None


def layer_row(layer: Any, params: PackedSeqParams | None, cp_group: Any) -> RowView:
    """The row that a layer runs on.

    Args:
        cp_group: see `row_view`.

    Raises:
        ScheduleError: the layer got no description of a packed row.
    """
    if params is None or params.qkv_format != "thd":
        raise ScheduleError(
            f"{type(layer).__name__} got a row without packed_seq_params (qkv_format='thd'); pass "
            "them to every pipeline and VPP chunk, or samples would see each other"
        )
    return row_view(params, cp_group)
