"""The simulator's inner loops, compiled; `pipeline` and the search share them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel


class RankOps(NamedTuple):
    """One rank's operations, each after what it waits for. Arrays [operations]."""

    stage: Ints
    microbatch: Ints
    backward: Ints
    waits_for: Ints
    """Index of the operation whose result this one takes; the number of operations for none."""
    scale: Floats
    """Seconds over the micro-batch's forward seconds: chunk weight, times the backward ratio."""
    pp: int
    p2p: float


@kernel
def rank_seconds(ops: RankOps, forward_seconds: Floats, end: Floats) -> float:
    """Seconds until a rank's last operation is done.

    Args:
        forward_seconds: float64 [M], one chunk's forward of each micro-batch.
        end: float64 [operations], written: when each operation ends.
    """
    free = np.zeros(ops.pp)
    count = ops.stage.size
    for op in range(count):
        begin = free[ops.stage[op]]
        source = ops.waits_for[op]
        if source < count and end[source] + ops.p2p > begin:
            begin = end[source] + ops.p2p
        done = begin + ops.scale[op] * forward_seconds[ops.microbatch[op]]
        end[op] = done
        free[ops.stage[op]] = done
    last = 0.0
    for stage in range(ops.pp):
        last = max(last, free[stage])
    return last


@kernel
def peak_live(ops: RankOps, amounts: Floats) -> float:
    """Most that one stage holds between forwards and their backwards, chunks counting whole.

    A step without backwards keeps nothing: one micro-batch at a time.
    """
    if ops.backward.max() == 0:
        return float(amounts.max())
    live = np.zeros(ops.pp)
    peak = 0.0
    for op in range(ops.stage.size):
        amount = amounts[ops.microbatch[op]]
        if ops.backward[op] == 1:
            live[ops.stage[op]] -= amount
        else:
            live[ops.stage[op]] += amount
            peak = max(peak, live[ops.stage[op]])
    return peak
