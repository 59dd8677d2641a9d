"""`Step`: what stays the same while one optimizer step is planned."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import CostModel
from megapack.layout import Layout
from megapack.pipeline.simulator import Runner
from megapack.policy import Policy
from megapack.prefixes import PrefixTable

UNLIMITED = 2**62
"""Capacity of a row without a budget: no int64 sum of a step's tokens reaches it."""

# Values of M that a search tries.
_MAX_COUNTS = 10


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step's settings. What is packed changes during the search: see `Items`."""

    number: int
    """The step's number, for messages."""
    lengths: Ints
    """int64: real tokens of every sample of the input, those of other steps included."""
    layout: Layout
    policy: Policy
    cost: CostModel
    """Seconds of a row."""
    budget: int | None
    """Padded tokens that a row of one DP rank may hold, a multiple of the row alignment; None for a
    count-based plan."""
    max_samples: int | None = None
    """Samples that a row of a count-based plan may hold; None for a plan with a budget."""
    forward_only: bool = False
    prefixes: PrefixTable | None = None
    """What samples of a row share; None: nothing."""
    image_seconds: Floats | None = None
    """float64: seconds of the first chunk's forward of each sample's images, of the whole input;
    None: rows encode no images."""
    patches: Ints | None = None
    """int64: patches of each sample's images, of the whole input; None: rows may have any."""
    adapter_of: Ints | None = None
    """int64: the adapter of every sample of the input; None: all have one."""

    @cached_property
    def capacity(self) -> int:
        """Padded tokens that the search puts into a row: the budget, or less if
        `max_live_tokens_per_gpu` leaves less to a row; `UNLIMITED` without a budget.

        Stage 0 of pp=4 1F1B holds the activations of 4 rows, so a cap of 32,768 live tokens leaves
        8,192 tokens to each. A forward-only pass holds one chunk of one row.
        """
        if self.budget is None:
            return UNLIMITED
        live = self.max_live
        if live is None:
            return self.budget
        layout = self.layout
        chunks = 1 if self.forward_only else layout.chunks_in_flight()
        least = layout.aligned_row_tokens(1)
        return min(self.budget, max(layout.longest_row(live // chunks), least))

    @property
    def least_piece(self) -> int:
        """Padded tokens of the shortest piece: the policy's, as far as a row holds two of them."""
        unit = self.layout.sample_alignment
        least = -(-(self.policy.least_piece or 0) // unit) * unit
        return max(min(least, self.capacity // 2 // unit * unit), unit)

    @property
    def cuts_samples(self) -> bool:
        """Whether samples may be cut at all."""
        return self.policy.split_samples == "auto" and self.budget is not None

    @property
    def group_size(self) -> int | None:
        """G; None with vpp=1."""
        return self.layout.group_size if self.layout.vpp > 1 else None

    def legal_count(self, least: int) -> int:
        """The smallest M from `least` on that the count rule allows."""
        return self.layout.next_legal_count(least, self.policy.count_rule)

    def least_count(self, num_rows: int) -> int:
        """The smallest M that the count rule allows and that has room for `num_rows` on all ranks.

        With pp=4, vpp=2, G=4 and dp=2, 9 rows need 5 per rank, and the next legal M is 8.
        """
        return self.legal_count(-(-num_rows // self.layout.dp))

    @property
    def max_live(self) -> int | None:
        """Row tokens of a DP rank that a stage may hold, each chunk counted whole; None without a
        cap."""
        cap = self.policy.max_live_tokens_per_gpu
        return None if cap is None else cap * self.layout.cp * self.layout.vpp

    @property
    def lockstep(self) -> bool:
        """Whether DP ranks wait for each other at every micro-batch."""
        return self.layout.ep_spans_dp

    @cached_property
    def runner(self) -> Runner:
        """The simulator of the step's ranks."""
        return Runner(self.layout, self.cost, self.forward_only)


def spread_counts(least: int, top: int) -> list[int]:
    """Values of M from `least` to `top`, smaller ones closer together.

    Integers only: powers may differ between machines.

    >>> spread_counts(4, 40)
    [4, 4, 5, 8, 11, 15, 20, 25, 32, 40]
    """
    last = _MAX_COUNTS - 1
    return [least + (top - least) * k * k // (last * last) for k in range(last + 1)]
