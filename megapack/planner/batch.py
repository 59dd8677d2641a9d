"""`Batch`: the samples of all steps, their rollouts, and the sets that stay in one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megapack.base.arrays import Ids, Ints, check_sets, read_adapters, read_lengths, read_sets
from megapack.errors import ConfigError, brief
from megapack.layout import Layout
from megapack.plan.plan import RolloutId
from megapack.policy import Policy
from megapack.prefixes import PrefixTable, SharedPrefixes, worthwhile


@dataclass(frozen=True)
class Batch:
    """All samples, n of them, of R rollouts."""

    lengths: Ints
    rollout_of: Ints
    """int64 [n]: each sample's rollout, numbered in order of first appearance."""
    ids: Ids | None
    """Per sample its rollout's id; None if no ids were given."""
    item_of: Ints
    """int64 [n]: each sample's item, numbered in order of first appearance. Samples of one item are
    packed into one row."""
    colocate_ids: Ids | None
    """Per sample its colocate id; None if no ids were given."""
    adapter_of: Ints
    """int64 [n]: each sample's adapter, see `read_adapters`."""
    adapter_ids: Ids | None
    """Per sample its adapter's id; None if no ids were given."""

    @classmethod
    def read(
        cls,
        lengths: Sequence[int] | Ints,
        rollout_ids: Sequence[RolloutId] | None,
        colocate_ids: Sequence[RolloutId] | None,
        adapter_ids: Sequence[RolloutId] | None = None,
    ) -> Batch:
        """The batch of a user's lists.

        Raises:
            DataError: invalid lengths or ids.
        """
        flat = read_lengths(lengths)
        sets = read_sets(rollout_ids, colocate_ids, flat.size)
        adapters = read_adapters(adapter_ids, flat.size)
        check_sets(*sets[2:], *adapters, "adapter", "; give a set one adapter")
        return cls(flat, *sets, *adapters)

    @cached_property
    def names(self) -> Sequence[RolloutId]:
        """The id of each rollout number."""
        return range(self.lengths.size) if self.ids is None else tuple(dict.fromkeys(self.ids))

    def names_of(self, rollouts: Ints) -> tuple[RolloutId, ...]:
        """The ids of rollout numbers."""
        return tuple(map(self.names.__getitem__, rollouts.tolist()))

    def rollout_tokens(self, layout: Layout) -> Ints:
        """int64 [R]: aligned tokens of each rollout."""
        tokens = np.zeros(len(self.names), dtype=np.int64)
        np.add.at(tokens, self.rollout_of, layout.aligned_sample_tokens(self.lengths))
        return tokens

    def steps(self, rollouts: Sequence[Ints]) -> Iterator[Ints]:
        """The samples of each step, from the rollouts of each.

        They are sorted by rollout, and then by item, so that a prefix of the step's rollouts is a
        prefix of its items: "drop" plans such a prefix.
        """
        step_of = np.empty(len(self.names), dtype=np.int64)
        for number, own in enumerate(rollouts):
            step_of[own] = number
        order = np.lexsort((self.item_of, self.rollout_of, step_of[self.rollout_of]))
        sizes = np.bincount(step_of[self.rollout_of], minlength=len(rollouts))
        yield from np.split(order, np.cumsum(sizes)[:-1])

    def prefix_table(
        self, prefixes: SharedPrefixes | None, layout: Layout, policy: Policy
    ) -> PrefixTable | None:
        """The prefixes that pay; None if none does, or the policy shares nothing.

        Raises:
            ConfigError, DataError: these are no prefixes of the samples.
        """
        if prefixes is None:
            return None
        if not isinstance(prefixes, SharedPrefixes):
            raise ConfigError(
                f"prefixes={brief(prefixes)}; give SharedPrefixes, for example "
                "from_samples(token_ids)"
            )
        prefixes.check(self.lengths)
        if policy.share_prefixes == "off":
            return None
        if self.adapter_ids is not None:
            prefixes = prefixes.apart(self.adapter_of)
        kept = worthwhile(prefixes, self.lengths, layout)
        return PrefixTable(kept, self.lengths, layout) if kept.order else None

    def item_tokens(self, layout: Layout, table: PrefixTable | None, width: int) -> Ints:
        """int64 [I]: padded tokens of each item in a row over `width` DP ranks. A colocated set is
        as large as the positions that a row of its samples holds."""
        tokens = np.zeros(int(self.item_of.max()) + 1, dtype=np.int64)
        np.add.at(tokens, self.item_of, layout.over(width).aligned_sample_tokens(self.lengths))
        if table is not None and self.colocate_ids is not None:
            everyone = np.arange(self.item_of.size)
            tokens -= table.over(width).saved(everyone, self.item_of, tokens.size)[0]
        return tokens
