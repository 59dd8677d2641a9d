"""The simulator's compiled inner loops, shared by `simulator` and the planner."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.base.loops import largest, smallest


class RankOps(NamedTuple):
    """Operations of one DP rank, each after the one that it waits for. Arrays are [operations]."""

    stage: Ints
    microbatch: Ints
    column: Ints
    """Where the operation's chunk finds its micro-batch's forward seconds: chunks are of kinds, of
    different `CostModel.square_factors`, and micro-batch k of kind i is at i * M + k."""
    held: Ints
    """1 if the operation begins to hold activations, -1 if it frees them, else 0."""
    waits_for: Ints
    """Index of the operation on another stage whose result this one needs; the number of operations
    if it needs none."""
    scale: Floats
    """Factor on the micro-batch's forward seconds: the chunk's weight, for a backward times the
    backward ratio."""
    pp: int
    p2p: float

    def read_only(self) -> RankOps:
        """The same; kernels would be compiled once more for arrays that they may write."""
        for values in self[:-2]:
            values.flags.writeable = False
        return self


@kernel
def rank_seconds(ops: RankOps, forward_seconds: Floats, end: Floats) -> float:
    """Seconds until a DP rank's last operation ends.

    Args:
        forward_seconds: float64 [kinds * M], the forward of each micro-batch through one chunk of
            each kind.
        end: float64 [operations], written: when each operation ends.
    """
    free = np.zeros(ops.pp)
    count = ops.stage.size
    for op in range(count):
        begin = free[ops.stage[op]]
        source = ops.waits_for[op]
        if source < count and end[source] + ops.p2p > begin:
            begin = end[source] + ops.p2p
        done = begin + ops.scale[op] * forward_seconds[ops.column[op]]
        end[op] = done
        free[ops.stage[op]] = done
    last = 0.0
    for stage in range(ops.pp):
        last = max(last, free[stage])
    return last


@kernel
def coupled_seconds(
    ops: RankOps, forward_seconds_MD: Floats, first_MD: Ints, end_OD: Floats
) -> float:
    """Seconds until the last operation of DP ranks ends that share some of their micro-batches.

    The ranks of a shared micro-batch begin each of its operations together, when the last of them
    is ready: they exchange keys and values in its layers. All ranks run the operations in one
    order. Ranks are the last axis, so that one machine instruction computes several of them.

    Args:
        forward_seconds_MD: float64 [kinds * M, dp], see `rank_seconds`; equal on the ranks of a
            shared micro-batch.
        first_MD: int64 [M, dp], the first rank of those that share the micro-batch; the rank itself
            for others.
        end_OD: float64 [operations, dp], written: when each operation ends.
    """
    num_microbatches, dp = first_MD.shape
    is_shared = np.zeros(num_microbatches, dtype=np.bool_)
    for microbatch in range(num_microbatches):
        for rank in range(dp):
            is_shared[microbatch] |= first_MD[microbatch, rank] != rank
    count = ops.stage.size
    free = np.zeros((ops.pp, dp))
    begin = np.empty(dp)
    for op in range(count):
        stage = ops.stage[op]
        source = ops.waits_for[op]
        microbatch = ops.microbatch[op]
        column = ops.column[op]
        if source < count:
            for rank in range(dp):
                begin[rank] = max(free[stage, rank], end_OD[source, rank] + ops.p2p)
        else:
            for rank in range(dp):
                begin[rank] = free[stage, rank]
        if is_shared[microbatch]:
            # The first rank of a block comes before the others, and collects the latest begin.
            for rank in range(dp):
                first = first_MD[microbatch, rank]
                begin[first] = max(begin[first], begin[rank])
            for rank in range(dp):
                begin[rank] = begin[first_MD[microbatch, rank]]
        for rank in range(dp):
            done = begin[rank] + ops.scale[op] * forward_seconds_MD[column, rank]
            end_OD[op, rank] = done
            free[stage, rank] = done
    last = 0.0
    for stage in range(ops.pp):
        for rank in range(dp):
            last = max(last, free[stage, rank])
    return last


class CoupledOps(NamedTuple):
    """Operations of DP ranks that share some of their micro-batches, rank after rank.

    All ranks run their forwards and backwards in one order, and their weight gradients anywhere.
    """

    stage: Ints
    microbatch: Ints
    kind: Ints
    """Index in `plan.order.KINDS`; 2 for weight gradients."""
    waits_for: Ints
    """As in `RankOps`, counted from the rank's first operation."""
    ends: Ints
    """int64 [dp + 1], where each rank begins."""
    first_DM: Ints
    """int64 [dp, M], the first rank of those that share the micro-batch; the rank itself for
    others."""
    pp: int
    p2p: float


@kernel
def coupled_order_seconds(ops: CoupledOps, seconds: Floats, end: Floats) -> float:
    """Seconds until the last operation of coupled DP ranks ends.

    The ranks of a shared micro-batch begin its forward, and its backward, together, when the last
    of them is ready; weight gradients wait for nobody.

    Args:
        seconds: float64 [operations of all ranks].
        end: float64 [operations of all ranks], written: when each operation ends.
    """
    dp = ops.ends.size - 1
    free = np.zeros((dp, ops.pp))
    begin = np.empty(dp)
    at = ops.ends[:-1].copy()
    while True:
        # Weight gradients that come before the next forward or backward of each rank.
        for rank in range(dp):
            while at[rank] < ops.ends[rank + 1] and ops.kind[at[rank]] == 2:
                op = at[rank]
                end[op] = free[rank, ops.stage[op]] + seconds[op]
                free[rank, ops.stage[op]] = end[op]
                at[rank] += 1
        # All ranks have as many forwards and backwards.
        if at[0] == ops.ends[1]:
            return float(largest(end))
        stage = ops.stage[at[0]]
        microbatch = ops.microbatch[at[0]]
        # The first rank of a block comes before the others, and collects the latest begin.
        for rank in range(dp):
            begin[rank] = free[rank, stage]
            count = ops.ends[rank + 1] - ops.ends[rank]
            source = ops.waits_for[at[rank]]
            if source < count:
                begin[rank] = max(begin[rank], end[ops.ends[rank] + source] + ops.p2p)
            first = ops.first_DM[rank, microbatch]
            begin[first] = max(begin[first], begin[rank])
        for rank in range(dp):
            op = at[rank]
            end[op] = begin[ops.first_DM[rank, microbatch]] + seconds[op]
            free[rank, stage] = end[op]
            at[rank] += 1


@kernel
def peak_live(ops: RankOps, amounts: Floats) -> float:
    """Peak of what one stage holds between forwards and their backwards; a chunk counts in full.

    Nothing is kept in a step without backwards, so its peak is the largest micro-batch.

    Args:
        amounts: float64 [M], what each micro-batch holds.
    """
    if smallest(ops.held) > 0:
        return float(largest(amounts))
    live = np.zeros(ops.pp)
    peak = 0.0
    for op in range(ops.stage.size):
        live[ops.stage[op]] += ops.held[op] * amounts[ops.microbatch[op]]
        peak = max(peak, live[ops.stage[op]])
    return peak
