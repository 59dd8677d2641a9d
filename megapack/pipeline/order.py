"""The order of operations in Megatron's schedules, as arrays for the simulator.

1F1B (vpp = 1) and the interleaved schedule (vpp > 1) as `megatron.core.pipeline_parallel.schedules`
runs them: a stage runs its warm-up forwards, then alternates one forward and one backward, then
runs the remaining backwards. In the interleaved schedule, virtual micro-batch k is a pair
(micro-batch, chunk) of the group table: G micro-batches go through chunk 0, then chunk 1, and so
on, then the next G; the last group may be smaller. With pp=2, vpp=2, G=3, M=5:

    k            0 1 2 3 4 5 6 7 8 9
    micro-batch  0 1 2 0 1 2 3 4 3 4
    chunk        0 0 0 1 1 1 0 0 1 1

Warm-up forwards of stage s: pp - s - 1 in 1F1B, 2 * (pp - s - 1) + (vpp - 1) * G interleaved (in
the example 5 on stage 0 and 3 on stage 1), and all forwards in a pass without backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megapack.base.arrays import Ints
from megapack.base.jit import kernel


@dataclass(frozen=True)
class StepOrder:
    """Every forward and backward of one DP rank's step, each after the one that it waits for.

    All arrays are int64 [2 * M * pp * vpp], half that long without backwards.
    """

    stage: Ints
    microbatch: Ints
    chunk: Ints
    """Position in the model, 0 to pp*vpp - 1: stage s holds chunks s, s + pp, s + 2*pp, ..."""
    backward: Ints
    """1 for a backward, 0 for a forward."""
    waits_for: Ints
    """Index of the operation on another stage whose result this one needs; the array's length if
    it needs none."""


@lru_cache(maxsize=256)
def step_order(
    pp: int, vpp: int, num_microbatches: int, group: int, forward_only: bool
) -> StepOrder:
    """The operations of a step.

    Args:
        num_microbatches, group: a legal M and G; G is unused with vpp = 1.
    """
    columns = _order(pp, vpp, num_microbatches, group, forward_only)
    assert columns.shape[1] > 0, "a legal M never deadlocks"
    for column in columns:
        column.flags.writeable = False
    return StepOrder(*columns)


@kernel
def _order(pp: int, vpp: int, num_microbatches: int, group: int, forward_only: bool) -> Ints:
    """Run the stages in turn, each until its next operation must wait; [5, 0] on a deadlock.

    The rows of the result are the fields of `StepOrder`.
    """
    total = num_microbatches * vpp
    table = _group_table(num_microbatches, vpp, group)
    passes = 1 if forward_only else 2
    size = passes * total * pp
    out = np.empty((5, size), dtype=np.int64)
    # Index of each finished operation by direction, chunk and micro-batch; -1 before it has run.
    index = np.full((2, pp * vpp, num_microbatches), -1, dtype=np.int64)
    position = np.zeros(pp, dtype=np.int64)
    done = 0
    while done < size:
        before = done
        for stage in range(pp):
            warmup = _num_warmup(pp, vpp, stage, total, group, forward_only)
            while position[stage] < passes * total:
                k, backward = _virtual(position[stage], warmup, total)
                chunk = table[1, k]
                if backward == 1:
                    chunk = vpp - 1 - chunk
                model_chunk = chunk * pp + stage
                source = model_chunk + 1 if backward == 1 else model_chunk - 1
                waits_for = size
                if 0 <= source < pp * vpp:
                    waits_for = index[backward, source, table[0, k]]
                    if waits_for < 0:
                        break
                out[0, done] = stage
                out[1, done] = table[0, k]
                out[2, done] = model_chunk
                out[3, done] = backward
                out[4, done] = waits_for
                index[backward, model_chunk, table[0, k]] = done
                done += 1
                position[stage] += 1
        if done == before:
            return np.empty((5, 0), dtype=np.int64)
    return out


@kernel
def _group_table(num_microbatches: int, vpp: int, group: int) -> Ints:
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


@kernel
def _num_warmup(pp: int, vpp: int, stage: int, total: int, group: int, forward_only: bool) -> int:
    if forward_only:
        return total
    if vpp == 1:
        return min(total, pp - stage - 1)
    return min(total, 2 * (pp - stage - 1) + (vpp - 1) * group)


@kernel
def _virtual(position: int, warmup: int, total: int) -> tuple[int, int]:
    """Virtual micro-batch of the operation at a stage's position, and 1 if it is a backward.

    With warmup=2 and total=4 a stage runs F0 F1, F2 B0 F3 B1, B2 B3.
    """
    if position < warmup:
        return position, 0
    steady = position - warmup
    if steady >= 2 * (total - warmup):
        return position - total, 1
    if steady % 2 == 0:
        return warmup + steady // 2, 0
    return steady // 2, 1
