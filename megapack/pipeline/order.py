"""The order of work in Megatron's schedules, as arrays that the simulator runs through.

1F1B (vpp = 1) and the interleaved schedule (vpp > 1) as `megatron.core.pipeline_parallel.schedules`
runs them: a stage does its warm-up forwards, then one forward and one backward in turn, then the
backwards that are left. Interleaved, virtual micro-batch k is a pair (micro-batch, chunk) of the
group table: groups of G micro-batches go through chunk 0, then chunk 1, and so on; the last group
may be a shorter tail. With pp=2, vpp=2, G=3, M=5:

    k            0 1 2 3 4 5 6 7 8 9
    micro-batch  0 1 2 0 1 2 3 4 3 4
    chunk        0 0 0 1 1 1 0 0 1 1

Warm-up forwards of stage s: pp - s - 1 in 1F1B, 2 * (pp - s - 1) + (vpp - 1) * G interleaved, all
of them where nothing goes backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megapack.base.arrays import Ints
from megapack.base.jit import kernel


@dataclass(frozen=True)
class StepOrder:
    """Every forward and backward of one rank's step, each after what it waits for.

    All arrays are int64 [2 * M * pp * vpp], half of that without backwards.
    """

    stage: Ints
    microbatch: Ints
    chunk: Ints
    """Place in the model, 0 to pp*vpp - 1: stage s holds chunks s, s + pp, s + 2*pp, ..."""
    backward: Ints
    """1 for a backward."""
    waits_for: Ints
    """Index of the operation on another stage whose result this one takes; the array's length
    where there is none."""


@lru_cache(maxsize=256)
def step_order(
    pp: int, vpp: int, num_microbatches: int, group: int, forward_only: bool
) -> StepOrder:
    """The operations of a step.

    Args:
        num_microbatches, group: a legal M and G; G is unused with vpp = 1.
    """
    columns = _order(pp, vpp, num_microbatches, group, forward_only)
    assert columns.shape[1] > 0, "a legal count never waits for ever"
    for column in columns:
        column.flags.writeable = False
    return StepOrder(*columns)


@kernel
def _order(pp: int, vpp: int, num_microbatches: int, group: int, forward_only: bool) -> Ints:
    """Let stages take turns, each going on until it waits. [5, 0] where all wait for ever."""
    total = num_microbatches * vpp
    table = _group_table(num_microbatches, vpp, group)
    passes = 1 if forward_only else 2
    size = passes * total * pp
    out = np.empty((5, size), dtype=np.int64)
    # Index of a finished operation by direction, chunk and micro-batch; -1 before.
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
                place = chunk * pp + stage
                source = place + 1 if backward == 1 else place - 1
                waits = size
                if 0 <= source < pp * vpp:
                    waits = index[backward, source, table[0, k]]
                    if waits < 0:
                        break
                out[0, done] = stage
                out[1, done] = table[0, k]
                out[2, done] = place
                out[3, done] = backward
                out[4, done] = waits
                index[backward, place, table[0, k]] = done
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
    """The virtual micro-batch at a stage's position, and 1 where it goes backward."""
    if position < warmup:
        return position, 0
    steady = position - warmup
    if steady >= 2 * (total - warmup):
        return position - total, 1
    if steady % 2 == 0:
        return warmup + steady // 2, 0
    return steady // 2, 1
