"""`Items`: what the planner packs whole, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megapack.base.arrays import Bools, Floats, Ints
from megapack.planner.bins import first_fit, first_fit_decreasing
from megapack.planner.step import Step
from megapack.prefixes import Spans

MOST_SQUARES = 2.0**40
"""What images may count as: sums of a step's items stay within int64."""


class ItemSizes(NamedTuple):
    """Sizes of items in rows of one width, int64 [I] each; see `Items`."""

    aligned: Ints
    aligned_sq: Ints
    shared: Ints
    shared_sq: Ints


@dataclass(frozen=True, kw_only=True)
class Items:
    """The samples of a step, n of them in I items.

    An item is a sample, all samples with one colocate id, a part of a family of samples with common
    beginnings, or a piece of a long sample. Of a family in pieces, the first pieces are one item,
    and so are the second pieces that are in one row.
    """

    step: Step
    samples: Ints
    """int64 [n]: indices into the input, sorted by rollout, then by item."""
    item_samples: Ints
    """int64 [I]: number of samples of each item."""
    lengths: Ints
    """int64 [I]: real tokens of each item."""
    aligned: Ints
    """int64 [I]: padded tokens of each item, with the sample alignment, without `shared`."""
    aligned_sq: Ints
    """int64 [I]: sum of the squared aligned lengths of the item's samples, without `shared_sq`."""
    shared: Ints
    """int64 [I]: positions saved by sharing inside the item; `aligned` is already without them."""
    shared_sq: Ints
    """int64 [I]: the sum of their squares, as `PrefixTable.saved` gives it."""
    begin: Ints
    """int64 [I]: first padded token of a piece; 0 for a whole item."""
    end: Ints
    """int64 [I]: padded token after the last one of a piece, of several samples after the longest;
    0 for a whole item."""
    chain: Ints
    """int64 [I]: number of the piece's chain; -1 for a whole item. The pieces of a chain are
    neighbours, in the order of their tokens."""

    @classmethod
    def whole(cls, step: Step, samples: Ints, item_of: Ints) -> Items:
        """Samples in items, without what these share inside.

        Args:
            samples: int64 [n], sorted by rollout, then by item.
            item_of: int64 [n], the item of each; those of one item are neighbours.
        """
        starts = np.flatnonzero(np.diff(item_of, prepend=-1))
        lengths = step.lengths[samples]
        aligned = step.layout.aligned_sample_tokens(lengths)
        none = np.zeros(starts.size, dtype=np.int64)
        return cls(
            step=step,
            samples=samples,
            item_samples=np.diff(starts, append=samples.size),
            lengths=np.add.reduceat(lengths, starts),
            aligned=np.add.reduceat(aligned, starts),
            aligned_sq=np.add.reduceat(aligned * aligned, starts),
            shared=none,
            shared_sq=none,
            begin=none,
            end=none,
            chain=none - 1,
        )

    @property
    def num_items(self) -> int:
        """I; the step can fill at most this many rows."""
        return self.item_samples.size

    @property
    def sample_lengths(self) -> Ints:
        """int64 [n]: real tokens of each sample."""
        return self.step.lengths[self.samples]

    @cached_property
    def first_samples(self) -> Ints:
        """int64 [I]: index of each item's first sample in `samples`."""
        return np.cumsum(self.item_samples) - self.item_samples

    @cached_property
    def sample_items(self) -> Ints:
        """int64 [n]: the item of each sample."""
        return np.repeat(np.arange(self.num_items), self.item_samples)

    @cached_property
    def sample_adapters(self) -> Ints:
        """int64 [n]: the adapter of each sample."""
        adapter_of = self.step.adapter_of
        return np.zeros_like(self.samples) if adapter_of is None else adapter_of[self.samples]

    @cached_property
    def kind(self) -> Ints:
        """int64 [I]: items of different kinds share no row: those of different adapters under
        adapters="one"."""
        is_one = self.step.policy.adapters == "one"
        return self.sample_adapters[self.first_samples] * is_one

    @cached_property
    def is_piece(self) -> Bools:
        """bool [I]: items that are pieces."""
        return self.chain >= 0

    @cached_property
    def num_pieces(self) -> int:
        """Items that are pieces."""
        return int(np.count_nonzero(self.is_piece))

    @cached_property
    def work(self) -> Floats:
        """float64 [I]: what each item adds to a row's forward through one chunk, on one GPU.

        Rows and ranks are balanced by it.
        """
        cost = self.step.cost
        work = float(cost.per_token) * self.aligned.astype(np.float64)
        squares = self.aligned_sq + self.image_squares
        work += float(cost.per_token_sq) * squares.astype(np.float64)
        return work + cost.per_sample * self.item_samples

    @cached_property
    def image_squares(self) -> Ints:
        """int64 [I]: squared tokens that take a chunk as long as the images of each item.

        The search counts images in all chunks, as the first one makes the others wait: stages
        that take 3 s and 1 s for a row run about as fast as two that take 3 s. Without a cost of
        squares images are not balanced.
        """
        step = self.step
        per_square = step.cost.per_token_sq * step.cost.share_of_rank(step.layout)
        if step.image_seconds is None or not per_square:
            return np.zeros_like(self.aligned)
        seconds = np.add.reduceat(step.image_seconds[self.samples], self.first_samples)
        return np.rint(np.minimum(seconds / per_square, MOST_SQUARES)).astype(np.int64)

    @cached_property
    def room(self) -> Ints:
        """int64 [I]: padded tokens that each item takes of a row's budget: its own, or its share of
        the budget of patches if that is more.

        With budgets of 8,192 tokens and 16,384 patches an item of 1,000 tokens and 8,192 patches
        takes 4,096 tokens. Rows are within both budgets, and hold less than both allow where
        items of many patches and items of text share them.
        """
        step, most = self.step, self.step.policy.max_patches_per_gpu
        if step.patches is None or most is None:
            return self.aligned
        patches = np.add.reduceat(step.patches[self.samples], self.first_samples)
        taken: Ints = -(-patches * step.capacity // most)
        return np.maximum(self.aligned, taken)

    @cached_property
    def square_share(self) -> float:
        """The part of the work that is squares of tokens."""
        squares = self.step.cost.per_token_sq * float(self.aligned_sq.sum())
        return squares / float(self.work.sum()) if squares else 0.0

    @cached_property
    def fewest_rows(self) -> tuple[Ints, int]:
        """Rows within the budget, as few as first-fit-decreasing finds.

        Rows of a count-based plan are filled with `max_samples` in input order.

        Returns:
            row_of: int64 [I], the row of each item.
            num_rows: number of rows.
        """
        sizes, most, fit = self.room, self.step.capacity, first_fit_decreasing
        if self.step.max_samples is not None:
            sizes, most, fit = self.item_samples, self.step.max_samples, first_fit
        row_of, num_rows = np.empty_like(sizes), 0
        for kind in np.unique(self.kind):
            own = self.kind == kind
            bins, num_bins = fit(sizes[own], most)
            row_of[own] = num_rows + bins
            num_rows += num_bins
        return row_of, num_rows

    def at_width(self, width: int) -> ItemSizes:
        """The items' sizes in rows over `width` DP ranks, whose alignment is coarser."""
        if width == 1:
            return ItemSizes(self.aligned, self.aligned_sq, self.shared, self.shared_sq)
        item = self.sample_items
        lengths = self.sample_lengths
        ends = np.where(self.is_piece[item], np.minimum(self.end[item], lengths), lengths)
        ends = self.step.layout.over(width).aligned_sample_tokens(ends)
        begin = self.begin[item]
        tokens = np.add.reduceat(ends - begin, self.first_samples)
        tokens_sq = np.add.reduceat(ends * ends - begin * begin, self.first_samples)
        if not self.shared.any():
            return ItemSizes(tokens, tokens_sq, self.shared, self.shared_sq)
        saved, saved_sq = self.saved(np.arange(self.num_items), self.num_items, width)
        shared = np.where(self.shared > 0, saved, 0)
        shared_sq = np.where(self.shared > 0, saved_sq, 0)
        return ItemSizes(tokens - shared, tokens_sq - shared_sq, shared, shared_sq)

    def saved(self, row_of: Ints, num_rows: int, width: int = 1) -> tuple[Ints, Ints]:
        """Tokens and squared tokens that rows save in all, `shared` of their items included.

        Args:
            row_of: int64 [I], the row of each item.
            width: that of all rows.

        Returns:
            int64 [num_rows] each.
        """
        table = self.step.prefixes
        if table is None:
            return np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
        item = self.sample_items
        spans = None
        if self.num_pieces:
            spans = Spans(self.begin[item], self.end[item], self.is_piece[item])
        return table.over(width).saved(self.samples, row_of[item], num_rows, spans)

    def under(self, step: Step) -> Items:
        """The same items, of a step with other costs."""
        return self if step is self.step else replace(self, step=step)

    def take(self, chosen: Ints) -> Items:
        """Some of the items: int64, in any order, and each any number of times."""
        sizes: dict[str, Any] = {name: getattr(self, name)[chosen] for name in _PER_ITEM}
        num = self.item_samples[chosen]
        within = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
        samples = self.samples[np.repeat(self.first_samples[chosen], num) + within]
        return replace(self, samples=samples, **sizes)

    def joined(self, others: Items) -> Items:
        """These items, and then the others."""
        names = ("samples", *_PER_ITEM)
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), getattr(others, name)]) for name in names
        }
        return replace(self, **columns)

    def merged(self, part_of: Ints) -> Items:
        """The parts of whole items as items, which share inside.

        Args:
            part_of: int64 [I], the part of each item.
        """
        num_parts = int(part_of.max()) + 1
        samples = self.samples[np.argsort(part_of[self.sample_items], kind="stable")]
        sizes: dict[str, Any] = {
            name: row_sums(getattr(self, name), part_of, num_parts) for name in _SIZES
        }
        whole: dict[str, Any] = {name: getattr(self, name)[:num_parts] for name in _SPANS}
        return replace(self, samples=samples, **sizes, **whole).sharing()

    def sharing(self) -> Items:
        """The items, each as large as its samples in one row, which holds what they share once."""
        shared, shared_sq = self.saved(np.arange(self.num_items), self.num_items)
        return self._with_shared(shared, shared_sq)

    def loose(self) -> Items:
        """The items as large as their samples without sharing; the inverse of `sharing`."""
        none = np.zeros(self.num_items, dtype=np.int64)
        return self._with_shared(none, none)

    def _with_shared(self, shared: Ints, shared_sq: Ints) -> Items:
        return replace(
            self,
            aligned=self.aligned - (shared - self.shared),
            aligned_sq=self.aligned_sq - (shared_sq - self.shared_sq),
            shared=shared,
            shared_sq=shared_sq,
        )


_SIZES = ("item_samples", "lengths", "aligned", "aligned_sq", "shared", "shared_sq")
_SPANS = ("begin", "end", "chain")
_PER_ITEM = (*_SIZES, *_SPANS)


def members_by_row(row_of: Ints, num_rows: int) -> list[Ints]:
    """The items of each row, ascending."""
    order = np.argsort(row_of, kind="stable")
    ends = np.cumsum(np.bincount(row_of, minlength=num_rows)).tolist()
    return [order[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def row_sums(values: Ints, row_of: Ints, num_rows: int) -> Ints:
    """int64 [num_rows]: sum of the items' values in each row."""
    sums = np.zeros(num_rows, dtype=np.int64)
    np.add.at(sums, row_of, values)
    return sums
