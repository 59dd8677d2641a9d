"""Rows of one verl rank: verl's own if they are within the budget, otherwise megapack's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np

from megapack.base.arrays import Ints
from megapack.cost.model import CostModel
from megapack.errors import ConfigError, DataError, HostAssertionError
from megapack.hosts.shared.families import family_parts, members_of
from megapack.hosts.shared.options import shares_prefixes
from megapack.hosts.shared.rank_rows import Need, Rows, plan_rank, split_rows
from megapack.layout import Layout, round_up
from megapack.planner.bins import fewest_bins_bound
from megapack.planner.partition import karmarkar_karp

# Work of L tokens is 24576 * L + L^2. 24576 is 6 * 4096, the hidden size of 7B that verl assumes.
_WORK_PER_TOKEN = 24576
_COST = CostModel(per_token=float(_WORK_PER_TOKEN), per_token_sq=1.0)


@dataclass(frozen=True, kw_only=True)
class VerlOptions:
    """Where the replacements may differ from verl's own behaviour."""

    light_rank: Literal["error", "pad"] = "error"
    """If a rank has fewer samples than M: "error" raises on all ranks, as verl does; "pad" runs
    copies of the rank's shortest sample (or smallest item) with zero loss masks. A copy has the
    indices of the samples that it copies."""
    layout: Layout | None = None
    """The job's layout: rows are planned and ordered for its pipeline, alignment counts against the
    budget, and M is any count that Megatron runs. None: verl's own rows, order and counts."""
    cost: CostModel | None = None
    """Seconds of a micro-batch, for planning with a layout; None counts its tokens and 256 more."""
    share_prefixes: bool = field(default_factory=shares_prefixes)
    """A rank's samples with common beginnings are packed into one row, in which `megatron_core`
    lets them share these. The budget counts every copy."""

    def __post_init__(self) -> None:
        if self.light_rank not in ("error", "pad"):
            raise ConfigError(f'light_rank={self.light_rank!r}; set "error" or "pad"')
        if self.cost is not None and self.layout is None:
            raise ConfigError("cost is used with a layout only; set both")


def calculate_workload(lengths: Ints) -> Ints:
    """Relative work of sequences: 24576 * L + L^2."""
    work: Ints = _WORK_PER_TOKEN * lengths + lengths**2
    return work


@dataclass
class RankItems:
    """One rank's samples as items: `group_size` consecutive samples that stay together."""

    lengths: Ints
    """int64 [samples]: real tokens."""
    max_tokens: int
    """Budget of a row, in real tokens."""
    group_size: int
    """Samples of an item; verl's force_group_size, not the G of the pipeline."""
    step: int
    """M is a multiple of it."""
    options: VerlOptions
    least: int = 1
    """The caller's lower bound of M."""
    token_ids: Sequence[Any] | None = None
    """Of the samples, to pack those with common beginnings as one. Items of several samples, which
    the host keeps together, are packed without."""
    need: Need = field(init=False)
    own: Rows = field(init=False, default_factory=list)
    """Rows of items within the budget; no rows if an item is over it."""

    def __post_init__(self) -> None:
        self._check()
        longest = int(self.tokens.max())
        count = 1
        if longest <= self.max_tokens:
            self.own, count = self._pack()
        self.need = Need(max(count, self.least), self.tokens.size, longest)

    @cached_property
    def tokens(self) -> Ints:
        """int64 [items]: real tokens of each item."""
        return _sums(self.lengths, self.group_size)

    @cached_property
    def work(self) -> Ints:
        """int64 [items]: work of each item, see `calculate_workload`."""
        return _sums(calculate_workload(self.lengths), self.group_size)

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

    @cached_property
    def _work_of_parts(self) -> Ints:
        return np.array([self.work[part].sum() for part in self.parts])

    @property
    def shortest(self) -> int:
        """The item with the fewest tokens."""
        return int(self.tokens.argmin())

    def shared_count(self, need: Need) -> int:
        """M of all ranks, from their combined need."""
        if need.longest > self.max_tokens:
            kind = "group of samples" if self.group_size > 1 else "sample"
            raise HostAssertionError(
                f"a {kind} of {need.longest} tokens is over max_token_len={self.max_tokens}; "
                f"set it to {need.longest} or more"
            )
        layout = self.options.layout
        if layout is not None:
            count = layout.next_legal_count(need.count)
        else:
            count = round_up(need.count, self.step)
        if count > need.room and self.options.light_rank == "error":
            raise HostAssertionError(
                f"{count} micro-batches (in multiples of {self.step}) are needed, and a rank can "
                f"fill {need.room}; give it more samples, raise max_token_len={self.max_tokens}, "
                "or configure(light_rank='pad')"
            )
        return count

    def rows(self, count: int) -> Rows:
        """`count` rows of items, or one row per item if there are fewer items."""
        if count != len(self.own) and self.options.layout is None and count <= len(self.parts):
            rows = self._balanced(count)
            if self._fits(rows):
                return rows
        return split_rows(self.own, count, self.work)

    def samples(self, rows: Rows) -> Rows:
        """Turn rows of items into rows of samples."""
        size = self.group_size
        return [[i for item in row for i in range(item * size, (item + 1) * size)] for row in rows]

    def _check(self) -> None:
        num_samples = self.lengths.size
        layout = self.options.layout
        if num_samples == 0:
            raise DataError("a rank has no samples; give every rank of dp_group one or more")
        if self.group_size < 1 or num_samples % self.group_size:
            raise HostAssertionError(
                f"{num_samples} samples in groups of force_group_size={self.group_size}; give a "
                "multiple"
            )
        if layout is not None and self.step not in (1, layout.group_size):
            raise ConfigError(
                f"num_batches_divided_by={self.step}, but the configured layout has G="
                f"{layout.group_size}; configure the layout of the job"
            )

    def _pack(self) -> tuple[Rows, int]:
        """Rows, and the M that they need.

        As in verl: Karmarkar-Karp by work, with `step` more rows until all are within the budget.
        megapack's planner packs if no number of rows is enough, or if a layout is set.
        """
        if self.options.layout is None:
            fewest = max(self.least, fewest_bins_bound(self.tokens, self.max_tokens))
            first = round_up(fewest, self.step)
            for count in range(first, len(self.parts) + 1, self.step):
                rows = self._balanced(count)
                if self._fits(rows):
                    return rows, count
        return self._plan()

    def _balanced(self, count: int) -> Rows:
        rows = karmarkar_karp(self._work_of_parts, count)
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
            colocate_ids=together.tolist() if len(self.parts) < self.lengths.size else None,
        )
        return [sorted({i // self.group_size for i in row}) for row in rows], count


def _sums(values: Ints, size: int) -> Ints:
    """Sums of each `size` consecutive values."""
    sums: Ints = values.reshape(-1, size).sum(axis=1)
    return sums
