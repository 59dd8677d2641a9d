"""The order of operations of a step: forwards, backwards and weight gradients on each stage.

An operation is the forward (F), the backward (B) or the weight gradients (W) of one micro-batch
through one chunk of a stage. Its text is micro-batch, kind, chunk: `2F1` is the forward of
micro-batch 2 through the stage's chunk 1. A backward whose micro-batch has a W leaves the gradients
of weights to it.

`step_order` makes the orders of Megatron's schedules, 1F1B (vpp = 1) and interleaving (vpp > 1): a
stage runs its warm-up forwards, then alternates one forward and one backward, then runs the
remaining backwards. In the interleaved schedule, virtual micro-batch k is a pair (micro-batch,
chunk) of the group table: G micro-batches go through chunk 0, then chunk 1, and so on, then the
next G; the last group may be smaller. With pp=2, vpp=2, G=3, M=5:

    k            0 1 2 3 4 5 6 7 8 9
    micro-batch  0 1 2 0 1 2 3 4 3 4
    chunk        0 0 0 1 1 1 0 0 1 1

Warm-up forwards of stage s: pp - s - 1 in 1F1B, 2 * (pp - s - 1) + (vpp - 1) * G interleaved (in
the example 5 on stage 0 and 3 on stage 1), and all forwards in a pass without backwards.

`chain_order` reverses the backwards inside of chains, whose later pieces send gradients to earlier
ones. Before its j-th backward, of virtual micro-batch b_j, a stage has run the forwards up to
max(b_0, ..., b_j) and its warm-up; in Megatron's orders b_j = j. With pp=1, M=3 and the chain of
micro-batches 0 and 1: F0 F1 B1 B0 F2 B2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.base.loops import largest

KINDS = "FBW"
"""Forward, backward, weight gradients; `StepOrder.kind` has their indices."""

Chains = Sequence[range]
"""The micro-batches of each chain of a DP rank, or of several ranks, where none has a micro-batch
of another."""


class Operation(NamedTuple):
    """One operation of a stage."""

    kind: str
    """A letter of `KINDS`."""
    microbatch: int
    chunk: int
    """Chunk of the stage, 0 to vpp - 1."""

    def __str__(self) -> str:
        return f"{self.microbatch}{self.kind}{self.chunk}"


@dataclass(frozen=True)
class StepOrder:
    """Every operation of one DP rank's step, each after the one that it waits for.

    All arrays are int64 [operations]. Operations of one stage are in the order in which it runs
    them.
    """

    stage: Ints
    microbatch: Ints
    chunk: Ints
    """Position in the model, 0 to pp*vpp - 1: stage s holds chunks s, s + pp, s + 2*pp, ..."""
    kind: Ints
    """Index in `KINDS`."""
    waits_for: Ints
    """Index of the operation on another stage whose result this one needs; the array's length if
    it needs none."""
    pp: int

    @cached_property
    def held(self) -> Ints:
        """int64: 1 if the operation begins to hold a row's activations, -1 if it frees them, else
        0. A row is held from its F to its W, or to its B if it has no W; in a pass without
        backwards nothing is freed."""
        held = np.where(self.kind == 0, 1, -1)
        if self.has_weights:
            is_put_off = np.zeros((int(self.chunk.max()) + 1, int(self.microbatch.max()) + 1), bool)
            is_weights = self.kind == 2
            is_put_off[self.chunk[is_weights], self.microbatch[is_weights]] = True
            held[(self.kind == 1) & is_put_off[self.chunk, self.microbatch]] = 0
        return held

    @property
    def passes(self) -> Ints:
        """Kind, micro-batch and chunk of the forwards and backwards alone, int64 [3, operations].
        Orders that differ in their weight gradients only have the same."""
        columns = np.stack([self.kind, self.microbatch, self.chunk])
        return columns[:, self.kind != 2]

    @property
    def has_weights(self) -> bool:
        """Whether some backwards are split."""
        return bool((self.kind == 2).any())

    def operations(self, stage: int) -> list[Operation]:
        """What a stage runs, in this order."""
        mine = self.stage == stage
        columns = (self.kind[mine], self.microbatch[mine], self.chunk[mine] // self.pp)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Operation(KINDS[kind], *place) for kind, *place in rows]

    def lines(self) -> tuple[str, ...]:
        """One text line per stage; `read_order` is the inverse.

        >>> step_order(2, 1, 2, 1, False).lines()
        ('0F0 1F0 0B0 1B0', '0F0 0B0 1F0 1B0')
        """
        return tuple(" ".join(map(str, self.operations(stage))) for stage in range(self.pp))

    def peak_live(self, amounts: Floats) -> Floats:
        """float64 [pp]: peak of what each stage holds; a chunk counts in full.

        Args:
            amounts: float64 [M], what each micro-batch holds.
        """
        if self.held.min() > 0:
            return np.full(self.pp, float(amounts.max()))
        changes = self.held * amounts[self.microbatch]
        stages = range(self.pp)
        return np.array([np.cumsum(changes[self.stage == stage]).max() for stage in stages])


@lru_cache(maxsize=256)
def step_order(
    pp: int, vpp: int, num_microbatches: int, group: int, forward_only: bool
) -> StepOrder:
    """The operations of a step in Megatron's order.

    Args:
        num_microbatches, group: a legal M and G; G is unused with vpp = 1.
    """
    backwards = np.arange(num_microbatches * vpp)
    return _frozen(pp, vpp, num_microbatches, group, forward_only, backwards)


def chain_order(pp: int, vpp: int, num_microbatches: int, group: int, chains: Chains) -> StepOrder:
    """The operations of a step whose chains run backwards in reverse.

    Args:
        num_microbatches, group: as in `step_order`.
        chains: of the DP rank; with vpp > 1 each lies within one group.

    >>> chain_order(2, 1, 3, 1, [range(0, 2)]).lines()
    ('0F0 1F0 2F0 1B0 0B0 2B0', '0F0 1F0 1B0 0B0 2F0 2B0')
    """
    turned = np.arange(num_microbatches)
    for chain in chains:
        turned[chain.start : chain.stop] = turned[chain.start : chain.stop][::-1]
    if vpp == 1:
        return _frozen(pp, vpp, num_microbatches, group, False, turned)
    table = group_table(num_microbatches, vpp, group)
    # Inside a chunk's part of a group, micro-batches are counted from the part's first one.
    backwards = np.arange(table.shape[1]) + turned[table[0]] - table[0]
    return _frozen(pp, vpp, num_microbatches, group, False, backwards)


def without_weights(line: str) -> str:
    """A stage's line without the weight gradients.

    >>> without_weights("0F0 0B0 1F0 0W0 1B0")
    '0F0 0B0 1F0 1B0'
    """
    return " ".join(text for text in line.split() if "W" not in text)


def chunk_ends(lines: Iterable[str], vpp: int) -> list[int]:
    """For each chunk of a stage, how many forwards and backwards the stage has run when the last
    operation of the chunk has; on the DP rank with the most.

    Args:
        lines: of the same stage on some DP ranks, see `StepOrder.lines`.

    >>> chunk_ends(["0F0 0F1 0B1 0W1 0B0 0W0", "0F0 0F1 0B1 0B0 0W0 0W1"], vpp=2)
    [4, 4]
    """
    ends = [0] * vpp
    for line in lines:
        passes = 0
        for text in line.split():
            passes += "W" not in text
            chunk = int(text.lstrip("0123456789")[1:])
            ends[chunk] = max(ends[chunk], passes)
    return ends


@lru_cache(maxsize=16)
def operation_texts(
    num_microbatches: int, vpp: int
) -> tuple[npt.NDArray[np.object_], dict[str, int]]:
    """The text of each operation of a stage, object [kinds, vpp, M]; and where each is, counted
    over the flat array. A step has each of them on every rank and stage."""
    operations = product(KINDS, range(vpp), range(num_microbatches))
    flat = [str(Operation(kind, k, chunk)) for kind, chunk, k in operations]
    texts = np.array(flat, dtype=object).reshape(len(KINDS), vpp, num_microbatches)
    return texts, {text: code for code, text in enumerate(flat)}


def _frozen(
    pp: int, vpp: int, num_microbatches: int, group: int, forward_only: bool, backwards: Ints
) -> StepOrder:
    warmup = np.arange(pp - 1, -1, -1) if vpp == 1 else deep_warmup(pp, vpp, group)
    if forward_only:
        warmup = np.full(pp, num_microbatches * vpp)
    own, ends = stage_lists(warmup, vpp, num_microbatches, group, forward_only, backwards)
    columns, _ = interleave(own, ends, pp, vpp)
    assert columns.shape[1] > 0, "a legal M never deadlocks"
    return order_of(columns, pp)


def deep_warmup(pp: int, vpp: int, group: int) -> Ints:
    """As many warm-up forwards as in the interleaved schedule, also with vpp=1, int64 [pp]. A stage
    that may run more of them has something to do while it waits for its first backward.

    >>> deep_warmup(4, 1, 1)
    array([6, 4, 2, 0])
    """
    return 2 * np.arange(pp - 1, -1, -1) + (vpp - 1) * group


def order_of(columns: Ints, pp: int) -> StepOrder:
    """The order of `interleave`'s columns, [5, operations]."""
    columns.flags.writeable = False
    stage, microbatch, chunk, kind, waits_for = columns
    return StepOrder(stage, microbatch, chunk, kind, waits_for, pp)


@kernel
def stage_lists(
    warmup: Ints, vpp: int, num_microbatches: int, group: int, forward_only: bool, backwards: Ints
) -> tuple[Ints, Ints]:
    """What each stage runs: kind, micro-batch and chunk in the model, int64 [3, operations], stage
    after stage; and where each stage begins, int64 [pp + 1].

    Args:
        warmup: int64 [pp], forwards that each stage runs before it alternates; no later stage has
            more.
        backwards: int64 [M * vpp], the virtual micro-batch of each backward.
    """
    pp = warmup.size
    total = num_microbatches * vpp
    table = group_table(num_microbatches, vpp, group)
    size = total if forward_only else 2 * total
    own = np.empty((3, size * pp), dtype=np.int64)
    ends = np.arange(pp + 1) * size
    for stage in range(pp):
        op = ends[stage]
        forwards = 0
        needed = 0
        for j in range(total):
            needed = max(needed, backwards[j] + 1)
            while forwards < min(total, needed + warmup[stage]):
                own[0, op] = 0
                own[1, op] = table[0, forwards]
                own[2, op] = table[1, forwards] * pp + stage
                forwards += 1
                op += 1
            if not forward_only:
                own[0, op] = 1
                own[1, op] = table[0, backwards[j]]
                own[2, op] = (vpp - 1 - table[1, backwards[j]]) * pp + stage
                op += 1
    return own, ends


@kernel
def interleave(own: Ints, ends: Ints, pp: int, vpp: int) -> tuple[Ints, Ints]:
    """Run the stages in turn, each until its next operation must wait.

    Args:
        own, ends: see `stage_lists`.

    Returns:
        The first five fields of `StepOrder`, [5, operations]; [5, 0] if the operations wait for
        each other in a circle. And how many operations each stage has run.
    """
    size = own.shape[1]
    out = np.empty((5, size), dtype=np.int64)
    # Index of each finished operation by kind, chunk and micro-batch; -1 before it has run.
    index = np.full((3, pp * vpp, int(largest(own[1])) + 1), -1, dtype=np.int64)
    position = np.zeros(pp, dtype=np.int64)
    done = 0
    while done < size:
        before = done
        for stage in range(pp):
            while ends[stage] + position[stage] < ends[stage + 1]:
                op = ends[stage] + position[stage]
                kind = own[0, op]
                chunk = own[2, op]
                source = chunk + 1 if kind == 1 else chunk - 1
                waits_for = size
                if kind != 2 and 0 <= source < pp * vpp:
                    waits_for = index[kind, source, own[1, op]]
                    if waits_for < 0:
                        break
                out[0, done] = stage
                out[1, done] = own[1, op]
                out[2, done] = chunk
                out[3, done] = kind
                out[4, done] = waits_for
                index[kind, chunk, own[1, op]] = done
                done += 1
                position[stage] += 1
        if done == before:
            return np.empty((5, 0), dtype=np.int64), position
    return out, position


@kernel
def group_table(num_microbatches: int, vpp: int, group: int) -> Ints:
    """Micro-batch and chunk of each virtual micro-batch, int64 [2, M * vpp]."""
    table = np.empty((2, num_microbatches * vpp), dtype=np.int64)
    k = 0
    first = 0
    while first < num_microbatches:
        last = min(first + group, num_microbatches)
        for chunk in range(vpp):
            for microbatch in range(first, last):
                table[0, k] = microbatch
                table[1, k] = chunk
                k += 1
        first = last
    return table
