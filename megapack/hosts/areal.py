"""AReaL: `areal.utils.seqpack` and the count that ranks agree on, with rows within the budget.

Both of AReaL's packing algorithms get the same rows: the fewest that its counts allow, of about
equal tokens. Checked against AReaL 1.0.4 and 2.0.0.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack.base.arrays import Ints
from megapack.cost.model import CostModel
from megapack.errors import ConfigError, HostRuntimeError, PlanError
from megapack.hosts import patching
from megapack.hosts.shared.balancing import exact_weights, first_fit_decreasing_pack
from megapack.hosts.shared.families import (
    callers_tokens,
    family_parts,
    members_of,
    real_tokens,
)
from megapack.hosts.shared.options import HostOptions, shares_prefixes
from megapack.hosts.shared.rank_rows import Need, Rows, agree_on_need, plan_rank, split_rows
from megapack.layout import Layout, round_up
from megapack.planner.bins import fewest_bins_bound, pack_to_targets
from megapack.planner.partition import karmarkar_karp

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = [
    "ArealOptions",
    "allocate_balanced_mbs_synced",
    "balanced_greedy_partition",
    "compute_forward_result",
    "configure",
    "ffd_allocate",
    "kk_allocate",
]


logger = logging.getLogger(__name__)

_FORWARD_RESULT = "areal.engine.megatron_engine.MegatronEngine._compute_forward_result"


@dataclass(frozen=True, kw_only=True)
class ArealOptions:
    """Where the replacements may differ from AReaL's own behaviour."""

    layout: Layout | None = None
    """The job's layout: micro-batches are planned and ordered for its pipeline, alignment counts
    against the budget, and M is any count that Megatron runs. None: AReaL's counts and order."""
    cost: CostModel | None = None
    """Seconds of a micro-batch, for planning with a layout; None counts its tokens and 256 more."""
    restore_cp_outputs: bool = False
    """With cp > 1, give log-probs and values of forward passes in the order of the tokens. AReaL
    1.0.4 compares a rank's own logits with labels of other positions, see docs/hosts/areal.md. 2.0
    does not, and the option changes nothing there."""
    share_prefixes: bool = field(default_factory=shares_prefixes)
    """A rank's sequences with common beginnings are packed into one micro-batch, in which
    `megatron_core` lets them share these. The budget counts every copy."""

    def __post_init__(self) -> None:
        if self.cost is not None and self.layout is None:
            raise ConfigError("cost is used with a layout only; set both")


_OPTIONS = HostOptions(ArealOptions())
configure = _OPTIONS.configure


def ffd_allocate(
    values: Sequence[int], capacity: int, min_groups: int, n_groups_divisor: int = 1
) -> Rows:
    """Groups of indices, each of at most `capacity` tokens, as few as the counts allow.

    Args:
        values: tokens of each sequence.
        capacity: tokens of a group.
        min_groups: least number of groups.
        n_groups_divisor: the number of groups is a multiple of it.

    Raises:
        HostRuntimeError: a sequence over the capacity, or fewer sequences than groups.
    """
    return _allocate(values, capacity, min_groups, n_groups_divisor)


def kk_allocate(
    values: Sequence[int],
    capacity: int,
    min_groups: int,
    n_groups_divisor: int = 1,
    equal_size: bool = False,
) -> Rows:
    """`ffd_allocate`, with two of AReaL's exceptions.

    If a multiple of `n_groups_divisor` needs more groups than there are sequences, each sequence is
    alone. `equal_size` gives every group the same number of sequences, whatever their tokens.

    Raises:
        HostRuntimeError: as `ffd_allocate`, or sequences that do not divide into equal sizes.
    """
    sizes = _sizes(values, capacity)
    least = max(min_groups or 1, n_groups_divisor)
    if equal_size:
        return _equal_groups(sizes, capacity, least, n_groups_divisor)
    count = round_up(max(least, fewest_bins_bound(sizes, capacity)), n_groups_divisor)
    if least <= sizes.size < count:
        return [[i] for i in range(sizes.size)]
    return _allocate(values, capacity, min_groups, n_groups_divisor)


def balanced_greedy_partition(nums: Sequence[int], K: int) -> Rows:
    """Partition items into K groups of equally many items and about equal sums.

    Raises:
        PlanError: fewer items than groups, or items that do not divide.
    """
    if len(nums) < K:
        raise PlanError(f"Number of items ({len(nums)}) must be >= K ({K}).")
    if len(nums) % K:
        raise PlanError(f"The length of nums must be divisible by K: {len(nums)} % {K} != 0")
    return karmarkar_karp(exact_weights(nums), K, equal_size=True)


def allocate_balanced_mbs_synced(
    mb_spec: Any, lens: Sequence[int], group: dist.ProcessGroup | None = None
) -> Rows:
    """Pack a rank's sequences into as many micro-batches as every other rank of the group has.

    Collective over `group`; None is all ranks. AReaL packs again until all ranks have the same
    count, and a rank that cannot leaves the others waiting.

    Args:
        mb_spec: AReaL's MicroBatchSpec.
        lens: tokens of each sequence, or of each `granularity` of them.

    Returns:
        The indices of each micro-batch, ascending; micro-batches by their first index, or with a
        configured layout in the order in which the pipeline runs them.

    Raises:
        HostRuntimeError: on every rank, if one has a sequence over the budget or too few sequences.
        ScheduleError: on every rank, if settings differ.
    """
    options = _OPTIONS.current
    capacity = int(mb_spec.max_tokens_per_mb)
    divisor = int(mb_spec.n_mbs_divisor or 1)
    least = max(int(mb_spec.n_mbs or 1), divisor)
    token_ids = callers_tokens(lens, _tokens_of) if options.share_prefixes else None
    rank, need = agree_on_need(
        lambda: _RankLengths(lens, capacity, least, divisor, options, token_ids),
        f"{capacity} {least} {divisor} {options}",
        group,
    )
    return rank.rows(need)


def compute_forward_result(self: Any, output: torch.Tensor, inputs: dict[str, Any]) -> Any:
    """Log-probs of next tokens, or a critic's values, of one micro-batch: [real tokens].

    Method of AReaL's MegatronEngine, which is called where the option changes nothing: with cp = 1,
    in tree training, and since AReaL 2.0, whose forward passes gather outputs before. 1.0 gives it
    this CP rank's share of them with cp > 1: tokens 0, 1, 6, 7 of a sequence of 8 on rank 0 of 2.
    With `restore_cp_outputs` the shares of all ranks are gathered, padding is removed, and values
    are those of cp = 1.

    Args:
        self: the engine.
        output: logits [tokens, vocabulary], or values [tokens, 1].
        inputs: AReaL's micro-batch; under CP with `_cp_` fields about the row before its split.
    """
    is_split = inputs.get("_cp_local_labels") is not None and not self.enable_tree_training
    if not is_split or not _OPTIONS.current.restore_cp_outputs:
        if is_split:
            _warn_of_positions()
        return patching.original(_FORWARD_RESULT)(self, output, inputs)
    host = importlib.import_module("areal.engine.megatron_engine")
    if self.config.is_critic:
        values = output.squeeze(-1)
    else:
        labels = inputs["_cp_local_labels"]
        values = host.gather_logprobs(output, labels, **_softmax_options(host, self))
    ends = inputs["_cp_padded_cu_seqlens"]
    whole = host.reassemble_cp_packed_logprobs(values, ends)
    padding = inputs.get("_cp_padding_length", 0)
    return host.unpad_logits(whole, padding, ends, inputs.get("_cp_old_cu_seqlens"))


def _softmax_options(host: Any, engine: Any) -> dict[str, Any]:
    is_split = host.mpu.get_tensor_model_parallel_world_size() > 1
    group = host.mpu.get_tensor_model_parallel_group() if is_split else None
    return {"temperature": engine.config.temperature, "tp_group": group}


@functools.cache
def _warn_of_positions() -> None:
    logger.warning(
        "areal: with cp > 1 forward passes give log-probs of other positions; set "
        "megapack.hosts.areal.configure(restore_cp_outputs=True) on all ranks"
    )


def _tokens_of(data: dict[str, Any]) -> Sequence[Any] | None:
    """The token ids of AReaL's padded batch."""
    ids, mask = data.get("input_ids"), data.get("attention_mask")
    return None if ids is None or mask is None else real_tokens(ids, mask)


class _RankLengths:
    """One rank's sequences, packed once, and what they need."""

    def __init__(
        self,
        lens: Sequence[int],
        capacity: int,
        least: int,
        divisor: int,
        options: ArealOptions,
        token_ids: Sequence[Any] | None,
    ) -> None:
        self._lens = np.asarray(lens, dtype=np.int64)
        self._capacity = capacity
        self._divisor = divisor
        self._options = options
        longest = int(self._lens.max(initial=0))
        self._part_of: list[int] | None = None
        if token_ids is not None:
            self._part_of = family_parts(
                token_ids, self._lens, options.layout, capacity, num_rows=round_up(least, divisor)
            )
        self._parts = members_of(self._part_of or range(self._lens.size))
        self._own: Rows = []
        count = least
        # A sequence over the budget is refused on all ranks, once all know of it.
        if longest <= capacity and self._lens.size:
            self._own, count = self._pack(least)
        self.need = Need(count, self._lens.size, longest)

    def rows(self, need: Need) -> Rows:
        """The micro-batches, `need.count` of them."""
        if need.longest > self._capacity:
            raise HostRuntimeError(
                f"a sequence of {need.longest} tokens is over max_tokens_per_mb={self._capacity}; "
                f"set it to {need.longest} or more"
            )
        layout = self._options.layout
        count = layout.next_legal_count(need.count) if layout is not None else need.count
        if count > need.room:
            raise HostRuntimeError(
                f"{count} micro-batches (in multiples of {self._divisor}) are needed, and a rank "
                f"has {need.room} sequences; give it more, or raise max_tokens_per_mb="
                f"{self._capacity}"
            )
        if layout is not None:
            return split_rows(self._own, count, self._lens)
        if count != len(self._own):
            packed = None
            if count <= len(self._parts):
                packed = _exactly(self._part_sizes, self._capacity, count)
            own = self._own if packed is None else self._of_parts(packed)
            self._own = split_rows(own, count, self._lens)
        return sorted(sorted(row) for row in self._own)

    def _pack(self, least: int) -> tuple[Rows, int]:
        options = self._options
        if options.layout is None:
            rows = _fewest(self._part_sizes, self._capacity, least, self._divisor)
            rows = self._of_parts(rows)
            return rows, round_up(max(least, len(rows)), self._divisor)
        rows, count = plan_rank(
            self._lens,
            self._capacity,
            layout=options.layout,
            cost=options.cost,
            colocate_ids=self._part_of,
            oversize="error",
        )
        return rows, max(count, least)

    @functools.cached_property
    def _part_sizes(self) -> Ints:
        return np.array([self._lens[part].sum() for part in self._parts])

    def _of_parts(self, rows: Rows) -> Rows:
        """Rows of parts as rows of sequences."""
        return [list(chain.from_iterable(self._parts[p] for p in row)) for row in rows]


def _allocate(values: Sequence[int], capacity: int, min_groups: int, divisor: int) -> Rows:
    sizes = _sizes(values, capacity)
    # AReaL allows min_groups=None.
    least = max(min_groups or 1, divisor)
    if sizes.size < least:
        raise HostRuntimeError(
            f"{sizes.size} sequences: smaller than min_groups={least}; give more sequences, or set "
            "a smaller n_mbs or n_mbs_divisor"
        )
    rows = _fewest(sizes, capacity, least, divisor)
    if len(rows) % divisor:
        raise HostRuntimeError(
            f"{sizes.size} sequences do not fill {round_up(len(rows), divisor)} groups, the next "
            f"multiple of n_mbs_divisor={divisor}; give more sequences, or raise the capacity of "
            f"{capacity} tokens"
        )
    return rows


def _sizes(values: Sequence[int], capacity: int) -> Ints:
    sizes = np.asarray([int(value) for value in values], dtype=np.int64)
    if sizes.size and sizes.max() > capacity:
        raise HostRuntimeError(
            f"a sequence of {sizes.max()} tokens is larger than capacity {capacity}; set "
            f"max_tokens_per_mb to {sizes.max()} or more"
        )
    return sizes


def _fewest(sizes: Ints, capacity: int, least: int, divisor: int) -> Rows:
    """Groups within the capacity, in the smallest number that the counts allow.

    A number that is not a multiple of `divisor` means that there are too few sequences for the
    next multiple.
    """
    first = round_up(max(least, fewest_bins_bound(sizes, capacity)), divisor)
    for count in range(first, sizes.size + 1, divisor):
        if (rows := _exactly(sizes, capacity, count)) is not None:
            return rows
    return first_fit_decreasing_pack(sizes.tolist(), capacity)


def _exactly(sizes: Ints, capacity: int, count: int) -> Rows | None:
    """`count` groups of about equal tokens within the capacity; None if none are found."""
    rows = karmarkar_karp(sizes, count)
    if all(int(sizes[row].sum()) <= capacity for row in rows):
        return rows
    targets = np.full(count, sizes.sum() / count)
    row_of = pack_to_targets(sizes, sizes.astype(np.float64), targets, capacity)
    if row_of is not None:
        return [np.flatnonzero(row_of == row).tolist() for row in range(count)]
    rows = first_fit_decreasing_pack(sizes.tolist(), capacity)
    return split_rows(rows, count, sizes) if len(rows) <= count else None


def _equal_groups(sizes: Ints, capacity: int, least: int, divisor: int) -> Rows:
    wanted = round_up(max(least, fewest_bins_bound(sizes, capacity)), divisor)
    count = min(wanted, sizes.size)
    if sizes.size < least or sizes.size % count:
        raise HostRuntimeError(
            f"{sizes.size} sequences do not divide into {count} groups of equal size, at least "
            f"{least}; set equal_size=False, or give a multiple"
        )
    return karmarkar_karp(sizes, count, equal_size=True)
