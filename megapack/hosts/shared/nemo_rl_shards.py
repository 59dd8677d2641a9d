"""Distribute the rows of a BatchedDataDict over shards, and cut each shard into micro-batches.

A "row" in this module is one sequence of the batch, as NeMo-RL calls it. Without packing, a batch
of 8 rows, 2 steps and 2 shards gives the first shard rows 0, 1 (step 0) and 4, 5 (step 1).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from megapack.base.arrays import Ints
from megapack.cost.model import CostModel, cost_in_tokens
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import ConfigError, HostAssertionError, PlanError
from megapack.hosts.shared.bin_packers import SequencePacker
from megapack.hosts.shared.families import (
    family_parts,
    has_lengths,
    members_of,
    plan_families,
)
from megapack.hosts.shared.rank_rows import Rows
from megapack.layout import Layout, round_up
from megapack.policy import Policy

Step = list[Rows]
"""The micro-batches of each shard; their numbers are rows of the whole batch."""


@dataclass(frozen=True)
class PackingArgs:
    """NeMo-RL's sequence_packing_args, applied to a batch."""

    max_tokens: int
    """Padded tokens of a micro-batch, before CP."""
    padded: Ints
    """int64 [rows]: tokens of each row, padded to sequence_length_pad_multiple."""
    largest_first: bool
    token_ids: list[Ints] | None = None
    """Of each row, to pack rows with common beginnings together."""

    @classmethod
    def read(cls, data: Any, args: dict[str, Any], *, with_ids: bool = False) -> PackingArgs:
        order = args.get("microbatch_order")
        if order not in (None, "packer", "largest_first"):
            raise ConfigError(f'microbatch_order={order!r}; set "packer" or "largest_first"')
        unit = int(args["sequence_length_pad_multiple"])
        lengths = _lengths(data, args)
        token_ids = None
        if with_ids:
            ids = data.data[args["input_key"]].cpu().numpy()
            # Where the driver has no ids, it gives placeholders of other lengths.
            rows = [row[:length] for row, length in zip(ids, lengths, strict=True)]
            token_ids = rows if has_lengths(rows, lengths) else None
        max_tokens = int(args["max_tokens_per_microbatch"])
        return cls(max_tokens, round_up(lengths, unit), order == "largest_first", token_ids)


def step_rows(
    data: Any, shards: int, batch_size: int | None, allow_uneven_shards: bool
) -> list[range]:
    """The rows of each step.

    Raises:
        HostAssertionError: rows that do not divide.
    """
    sizes = {len(value) for value in data.data.values()}
    if len(sizes) != 1:
        raise HostAssertionError(
            f"Batch sizes are not the same across the rollout batch: {sorted(sizes)}"
        )
    num_rows = sizes.pop()
    size = num_rows if batch_size is None else batch_size
    if num_rows % size:
        raise HostAssertionError(
            f"Total batch size ({num_rows}) is not a multiple of batch_size ({size})"
        )
    if size % shards and not allow_uneven_shards:
        raise HostAssertionError(f"Batch size ({size}) is not a multiple of shards ({shards})")
    return [range(first, first + size) for first in range(0, num_rows, size)]


def plain_shards(data: Any, steps: list[range], shards: int) -> list[Any]:
    """Give each shard consecutive rows of each step; the last shards may get fewer."""
    size = -(-len(steps[0]) // shards)
    return [
        _shard(data, [i for rows in steps for i in rows[s * size : (s + 1) * size]])
        for s in range(shards)
    ]


def pack_step(packer: SequencePacker, packing: PackingArgs, rows: range, shards: int) -> Step:
    """Pack the rows of one step into bins, and give the bins to the shards in turn."""
    bins = _pack_families(packer, packing, rows, shards)
    if bins is None:
        bins = packer.pack(packing.padded[rows].tolist())
    bins = [[rows[i] for i in row] for row in bins]
    return [bins[s::shards] for s in range(shards)]


def _pack_families(
    packer: SequencePacker, packing: PackingArgs, rows: range, shards: int
) -> Rows | None:
    """Bins of whole parts of families; None if there are none, or they do not fill the bins."""
    if packing.token_ids is None:
        return None
    token_ids = [packing.token_ids[i] for i in rows]
    padded = packing.padded[rows]
    part_of = family_parts(token_ids, padded, None, packing.max_tokens, num_rows=shards)
    if part_of is None:
        return None
    parts = members_of(part_of)
    with contextlib.suppress(PlanError):
        bins = packer.pack([int(padded[part].sum()) for part in parts])
        return [sorted(chain.from_iterable(parts[p] for p in row)) for row in bins]
    return None


def plan_steps(
    packing: PackingArgs, steps: list[range], shards: int, layout: Layout, cost: CostModel | None
) -> list[Step]:
    """Plan every step for the layout.

    Raises:
        PlanError: a row over the budget, or too few rows for any M that the pipeline runs.
    """
    if layout.dp != shards:
        raise ConfigError(f"the configured layout has dp={layout.dp}, the batch {shards} shards")
    budget = packing.max_tokens // layout.cp
    # A shard cannot express a micro-batch without rows.
    policy = Policy(oversize="error", unreachable="error")
    cost = cost or cost_in_tokens(layout)
    plan = None
    if packing.token_ids is not None:
        plan = plan_families(
            packing.token_ids,
            packing.padded,
            [step for step, rows in enumerate(steps) for _ in rows],
            layout=layout,
            max_tokens_per_gpu=budget,
            cost=cost,
            policy=policy,
        )
    if plan is None:
        plan = build_dp_schedule(
            packing.padded,
            layout=layout,
            max_tokens_per_gpu=budget,
            global_batch_size=len(steps[0]),
            cost=cost,
            policy=policy,
        )
    return [[[list(mb.samples) for mb in rank] for rank in step.ranks] for step in plan.steps]


def packed_shards(
    data: Any, packing: PackingArgs, plan: list[Step], num_shards: int
) -> tuple[list[Any], list[int]]:
    """Shards with the boundaries of their micro-batches, and the batch's row for each shard row."""
    shards: list[Any] = []
    indices: list[int] = []
    for s in range(num_shards):
        steps = [_ordered(step[s], packing) for step in plan]
        rows = [i for step in steps for row in step for i in row]
        shard = _shard(data, rows)
        shard.micro_batch_indices = [_boundaries(step) for step in steps]
        shard.micro_batch_lengths = [
            [int(packing.padded[row].sum()) for row in step] for step in steps
        ]
        shard.elem_counts_per_gb = [sum(map(len, step)) for step in steps]
        shards.append(shard)
        indices += rows
    return shards, indices


def dynamic_shards(
    data: Any, steps: list[range], num_shards: int, args: dict[str, Any]
) -> tuple[list[Any], list[int]]:
    """Shards whose micro-batches are rectangles of rows of similar length, equal on every shard."""
    lengths = _lengths(data, args)
    rows_of: list[list[int]] = [[] for _ in range(num_shards)]
    boundaries: list[list[list[int]]] = []
    widths: list[list[int]] = []
    indices: list[int] = []
    for rows in steps:
        shortest_first = sorted(rows, key=lambda i: lengths[i])
        for s in range(num_shards):
            rows_of[s] += shortest_first[s::num_shards]
            indices += shortest_first[s::num_shards]
        # The k-th rows of all shards are in the same micro-batch: their longest decides its width.
        longest = lengths[shortest_first].reshape(-1, num_shards).max(axis=1)
        unit = int(args["sequence_length_round"])
        max_width = data.data[args["input_key"]].shape[1]
        row_tokens = np.minimum(round_up(longest, unit), max_width)
        rectangles = _rectangles(row_tokens.tolist(), int(args["max_tokens_per_microbatch"]))
        boundaries.append([[start, end] for start, end, _ in rectangles])
        widths.append([width for _, _, width in rectangles])
    shards = [_shard(data, rows) for rows in rows_of]
    for shard in shards:
        shard.micro_batch_indices = boundaries
        shard.micro_batch_lengths = widths
    return shards, indices


def _rectangles(row_tokens: list[int], max_tokens: int) -> list[tuple[int, int, int]]:
    """(start, end, width) of consecutive rows whose number times width is within the budget."""
    if max(row_tokens) > max_tokens:
        raise HostAssertionError(
            f"a row of {max(row_tokens)} padded tokens is over max_tokens_per_microbatch="
            f"{max_tokens}; raise it"
        )
    rectangles = [(0, 0, 0)]
    for i, tokens in enumerate(row_tokens):
        start, _, width = rectangles[-1]
        if (i + 1 - start) * max(width, tokens) <= max_tokens:
            rectangles[-1] = (start, i + 1, max(width, tokens))
        else:
            rectangles.append((i, i + 1, tokens))
    return rectangles


def _ordered(rows: Rows, packing: PackingArgs) -> Rows:
    if not packing.largest_first:
        return rows
    return sorted(rows, key=lambda row: -int(packing.padded[row].sum()))


def _boundaries(rows: Rows) -> list[list[int]]:
    """[start, end] of each micro-batch within the step's rows of the shard."""
    ends = np.cumsum([len(row) for row in rows]).tolist()
    return [[end - len(row), end] for row, end in zip(rows, ends, strict=True)]


def _shard(data: Any, rows: list[int]) -> Any:
    """Rows of the batch, in the type that the host's own slice returns."""
    if rows:
        return data.select_indices(rows).slice(0, len(rows))
    empty = type(data.slice(0, 1))()
    for name, value in data.data.items():
        # Images of unequal sizes cannot be sliced to nothing; they have a method for it.
        has_method = hasattr(value, "empty_rows_like")
        empty[name] = value.empty_rows_like(value, 0) if has_method else value[:0]
    return empty


def _lengths(data: Any, args: dict[str, Any]) -> Ints:
    lengths = data.data[args["input_lengths_key"]]
    return np.array([int(length) for length in lengths], dtype=np.int64)
