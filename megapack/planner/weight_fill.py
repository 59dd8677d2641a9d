"""Weight gradients in the waits of stages, and the seconds of a DP rank that runs them there.

A split backward leaves its weight gradients (W) to the stage, which may run them at any later time.
The forwards and backwards of a stage keep their order. Where the next one waits for another stage,
the stage runs the W's of its earlier backwards: first in, first out, as long as they end before the
wait does, or not much later. With pp=2 and two rows whose forward, backward and W take 1 s each:

    stage 0   0F0 1F0 .   0B0 0W0 1B0 1W0
    stage 1   .   0F0 0B0 1F0 1B0 0W0 1W0

A row is held until its W. Where the next forward would put more tokens on the stage than it may
hold, W's run first, so memory is not the price.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.base.loops import largest
from megapack.plan.order import Operation


class Times(NamedTuple):
    """What the micro-batches of a DP rank cost in a chunk of weight 1. Arrays are float64 [M]."""

    forward: Floats
    """Seconds of the forward."""
    backward: Floats
    """Seconds of the backward, without what is left to the W."""
    weights: Floats
    """Seconds of the W; all 0 if backwards are not split."""
    held: Floats
    """Tokens that a stage holds from the forward to the W, each chunk counted whole."""


class FillRules(NamedTuple):
    """How stages run their operations."""

    chunk_weights: Floats
    """float64 [pp * vpp]: relative seconds of the chunks."""
    pp: int
    p2p: float
    """Seconds from the end of an operation to the arrival of its result on another stage."""
    cap: float
    """Tokens that a stage may hold, each chunk counted whole; inf without a cap."""
    split: bool
    """Whether backwards leave weight gradients to W's."""
    patience: float
    """A W may end later than the wait does, by this part of its own seconds. With 0.75, a W of 4 s
    starts if the wait is 1 s or longer."""


@kernel
def filled_seconds(rules: FillRules, ops: Ints, times: Times, ran: Ints, num_ran: Ints) -> float:
    """Seconds until a DP rank's last operation ends; inf if a stage breaks its cap.

    Args:
        ops: int64 [operations, 5]: stage, micro-batch, chunk in the model, kind and waits_for of
            `StepOrder`, without W's.
        ran: int64 [pp, 2 * operations / pp], written: what each stage runs, in this order: the
            index of an F or B, or -1 - index for the W of this B.
        num_ran: int64 [pp], written: how many these are.
    """
    count = ops.shape[0]
    free = np.zeros(rules.pp)
    live = np.zeros(rules.pp)
    end = np.empty(count)
    # Backwards whose W has not run: a queue per stage, with its first entry and its end.
    queue = np.empty((rules.pp, count // rules.pp), dtype=np.int64)
    first = np.zeros(rules.pp, dtype=np.int64)
    last = np.zeros(rules.pp, dtype=np.int64)
    num_ran[:] = 0
    for op in range(count):
        stage = ops[op, 0]
        microbatch = ops[op, 1]
        is_forward = ops[op, 3] == 0
        source = ops[op, 4]
        ready = end[source] + rules.p2p if source < count else 0.0
        held = times.held[microbatch]
        while first[stage] < last[stage]:
            waiting = queue[stage, first[stage]]
            seconds = times.weights[ops[waiting, 1]] * rules.chunk_weights[ops[waiting, 2]]
            fits = free[stage] + (1 - rules.patience) * seconds <= ready and ready > free[stage]
            is_full = is_forward and live[stage] + held > rules.cap
            if not fits and not is_full:
                break
            free[stage] += seconds
            live[stage] -= times.held[ops[waiting, 1]]
            ran[stage, num_ran[stage]] = -1 - waiting
            num_ran[stage] += 1
            first[stage] += 1
        own = times.forward[microbatch] if is_forward else times.backward[microbatch]
        end[op] = max(free[stage], ready) + rules.chunk_weights[ops[op, 2]] * own
        free[stage] = end[op]
        ran[stage, num_ran[stage]] = op
        num_ran[stage] += 1
        if is_forward:
            live[stage] += held
            if live[stage] > rules.cap:
                return np.inf
        elif rules.split:
            queue[stage, last[stage]] = op
            last[stage] += 1
        else:
            live[stage] -= held
    for stage in range(rules.pp):
        for k in range(first[stage], last[stage]):
            waiting = queue[stage, k]
            free[stage] += times.weights[ops[waiting, 1]] * rules.chunk_weights[ops[waiting, 2]]
            ran[stage, num_ran[stage]] = -1 - waiting
            num_ran[stage] += 1
    return float(largest(free))


def order_lines(ops: Ints, ran: Ints, num_ran: Ints) -> tuple[str, ...]:
    """What each stage runs, as `StepOrder.lines`.

    Args:
        ops, ran, num_ran: of `filled_seconds`.
    """
    pp = num_ran.size
    columns = [column.tolist() for column in (ops[:, 1], ops[:, 2] // pp, ops[:, 3])]
    lines = []
    for stage in range(pp):
        texts = []
        for index in ran[stage, : num_ran[stage]].tolist():
            op = index if index >= 0 else -1 - index
            microbatch, chunk, kind = (column[op] for column in columns)
            texts.append(str(Operation("W" if index < 0 else "FB"[kind], microbatch, chunk)))
        lines.append(" ".join(texts))
    return tuple(lines)
