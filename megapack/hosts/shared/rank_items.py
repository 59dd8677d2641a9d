"""One rank's samples, packed within the host's budget, and an M that all ranks can run.

verl, ROLL and AReaL give each rank its samples first. Without a layout a rank's rows are those of
the host's own partition where these are within the budget; with one, megapack's planner makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from megapack.base.arrays import Ints
from megapack.cost.model import CostModel
from megapack.errors import DataError, HostAssertionError, PlanError
from megapack.hosts.shared.families import family_parts, members_of
from megapack.hosts.shared.images import Patches, image_tokens
from megapack.hosts.shared.options import PlannerOptions
from megapack.hosts.shared.rank_rows import Need, Rows, plan_rank, split_rows
from megapack.layout import round_up
from megapack.planner.bins import fewest_bins_bound

# Work of L tokens is 24576 * L + L^2. 24576 is 6 * 4096, the hidden size of 7B that verl and ROLL
# assume.
_WORK_PER_TOKEN = 24576
_COST = CostModel(per_token=float(_WORK_PER_TOKEN), per_token_sq=1.0)

Partition = Callable[[list[int], int], Rows]
"""A host's own partition: the work of items and a number of parts -> the items of each part. Parts
may be more, or none if the host finds none."""


def calculate_workload(lengths: Ints) -> Ints:
    """Relative work of sequences: 24576 * L + L^2."""
    work: Ints = _WORK_PER_TOKEN * lengths + lengths**2
    return work


@dataclass(kw_only=True)
class RankItems:
    """One rank's samples as items: `group_size` consecutive samples that stay together."""

    lengths: Ints
    """int64 [samples]: real tokens."""
    max_tokens: int
    """Budget of a row, in real tokens."""
    budget: str
    """What the host calls the budget, for errors."""
    partition: Partition
    """The host's own; used without a layout."""
    options: PlannerOptions
    group_size: int = 1
    """Samples of an item; verl's force_group_size, not the G of the pipeline."""
    step: int = 1
    """M is a multiple of it."""
    least: int = 1
    """The caller's lower bound of M."""
    token_ids: Sequence[Any] | None = None
    """Of the samples, to pack those with common beginnings as one. Items of several samples, which
    the host keeps together, are packed without."""
    patches: Patches | None = None
    """Of the samples' images, which the model encodes in the samples' rows."""
    work_of: Callable[[Ints], Ints] = calculate_workload
    """Work of samples by their tokens, by which rows are even."""
    error: type[PlanError] = HostAssertionError
    """What the host raises where samples cannot be packed."""
    need: Need = field(init=False)
    own: Rows = field(init=False, default_factory=list)
    """Rows of items within the budget; no rows if an item is over it."""

    def __post_init__(self) -> None:
        num_samples = self.lengths.size
        if num_samples == 0:
            raise DataError("a rank has no samples; give every rank of the group one or more")
        if self.group_size < 1 or num_samples % self.group_size:
            raise self.error(
                f"{num_samples} samples in groups of force_group_size={self.group_size}; give a "
                "multiple"
            )
        longest = int(self.tokens.max())
        count = 1
        # An item over the budget is refused on all ranks, once all know of it.
        if longest <= self.max_tokens:
            self.own, count = self._pack()
        self.need = Need(max(count, self.least), self.tokens.size, longest)

    @cached_property
    def tokens(self) -> Ints:
        """int64 [items]: real tokens of each item."""
        return self._sums(self.lengths)

    @cached_property
    def work(self) -> Ints:
        """int64 [items]: work of each item."""
        images = _WORK_PER_TOKEN * image_tokens(self.patches, self.lengths.size)
        return self._sums(self.work_of(self.lengths) + images.astype(np.int64))

    @cached_property
    def parts(self) -> Rows:
        """The items that are packed as one: parts of families, else one each."""
        part_of = None
        if self.token_ids is not None and self.group_size == 1:
            part_of = family_parts(
                self.token_ids,
                self.lengths,
                self.options.layout,
                self.max_tokens,
                num_rows=round_up(self.least, self.step),
            )
        return members_of(range(self.tokens.size) if part_of is None else part_of)

    @property
    def shortest(self) -> int:
        """The item with the fewest tokens."""
        return int(self.tokens.argmin())

    def shared_count(self, need: Need, *, pads: bool = False, remedy: str = "") -> int:
        """M of all ranks, from their combined need.

        Args:
            pads: a rank with fewer items than M is filled up by the host.
            remedy: what else the user may set.

        Raises:
            PlanError: an item over the budget, or fewer items than M, on any rank.
        """
        if need.longest > self.max_tokens:
            kind = "group of samples" if self.group_size > 1 else "sample"
            raise self.error(
                f"a {kind} of {need.longest} tokens is over {self.budget}={self.max_tokens}; set "
                f"it to {need.longest} or more"
            )
        layout = self.options.layout
        if layout is not None:
            count = layout.next_legal_count(need.count)
        else:
            count = round_up(need.count, self.step)
        if count > need.room and not pads:
            raise self.error(
                f"{count} micro-batches (in multiples of {self.step}) are needed, and a rank can "
                f"fill {need.room}; give it more samples, or raise {self.budget}={self.max_tokens}"
                f"{remedy}"
            )
        return count

    def rows(self, count: int) -> Rows:
        """`count` rows of items, or one row per item if there are fewer items."""
        if count != len(self.own) and self.options.layout is None and count <= len(self.parts):
            rows = self._partitioned(count)
            if len(rows) == count and self._fits(rows):
                return rows
        return split_rows(self.own, count, self.work)

    def samples(self, rows: Rows) -> Rows:
        """Turn rows of items into rows of samples."""
        size = self.group_size
        return [[i for item in row for i in range(item * size, (item + 1) * size)] for row in rows]

    def _pack(self) -> tuple[Rows, int]:
        """Rows, and the M that they need.

        The host's partition, with `step` more rows until all are within the budget. megapack's
        planner packs if no number of rows is enough, or if a layout is set.
        """
        if self.options.layout is None:
            fewest = max(self.least, fewest_bins_bound(self.tokens, self.max_tokens))
            first = round_up(fewest, self.step)
            for count in range(first, len(self.parts) + 1, self.step):
                rows = self._partitioned(count)
                if len(rows) >= count and self._fits(rows):
                    return rows, len(rows)
        return self._plan()

    def _partitioned(self, count: int) -> Rows:
        work = [int(self.work[part].sum()) for part in self.parts]
        rows = self.partition(work, count)
        return [sorted(chain.from_iterable(self.parts[p] for p in row)) for row in rows]

    def _fits(self, rows: Rows) -> bool:
        return all(int(self.tokens[row].sum()) <= self.max_tokens for row in rows)

    def _plan(self) -> tuple[Rows, int]:
        """Rows of items by megapack's planner, and its M."""
        together = np.empty(self.lengths.size, dtype=np.int64)
        for number, samples in enumerate(self.samples(self.parts)):
            together[samples] = number
        layout = self.options.layout
        rows, count = plan_rank(
            self.lengths,
            self.max_tokens,
            oversize="error",
            layout=layout,
            cost=_COST if layout is None else self.options.cost,
            patches=self.patches,
            colocate_ids=together.tolist() if len(self.parts) < self.lengths.size else None,
        )
        return [sorted({i // self.group_size for i in row}) for row in rows], count

    def _sums(self, values: Ints) -> Ints:
        """Sums of each `group_size` consecutive values."""
        sums: Ints = values.reshape(-1, self.group_size).sum(axis=1)
        return sums
