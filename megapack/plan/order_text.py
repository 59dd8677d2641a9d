"""Reads the text of an order, and checks that it can run."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megapack.base.arrays import Ints
from megapack.errors import PlanError, brief
from megapack.plan.order import KINDS, Chains, StepOrder, interleave, operation_texts, order_of


def read_order(
    lines: Sequence[str], *, vpp: int, num_microbatches: int, chains: Chains = ()
) -> StepOrder:
    """Read and check an order of a training step.

    Args:
        lines: one per stage, see `StepOrder.lines`.
        chains: those of the DP rank.

    Raises:
        PlanError: an operation is unknown, missing, there twice, or can never run; the message
            names it.

    >>> read_order(["0F0 0B0"], vpp=1, num_microbatches=1).kind
    array([0, 1])
    >>> read_order(["0F0 1F0 0B0 1B0", "0F0 1B0 0B0 1F0"], vpp=1, num_microbatches=2)
    Traceback (most recent call last):
    ...
    megapack.errors.PlanError: stage 1 cannot run 1B0: its forward 1F0 comes later
    """
    pp = len(lines)
    known, codes = operation_texts(num_microbatches, vpp)
    stages = []
    for stage, line in enumerate(lines):
        texts = line.split()
        own = np.array([codes.get(text, -1) for text in texts], dtype=np.int64)
        if (own < 0).any():
            raise _unknown(texts[int(own.argmin())], stage, vpp, num_microbatches)
        problem = _wrong_place(own, known, chains)
        if problem:
            raise PlanError(f"stage {stage} {problem}")
        stages.append(own)
    kind, chunk, microbatch = np.unravel_index(np.concatenate(stages), known.shape)
    ends = np.cumsum([0, *(own.size for own in stages)])
    model_chunk = chunk * pp + np.repeat(np.arange(pp), np.diff(ends))
    columns, done = interleave(np.stack([kind, microbatch, model_chunk]), ends, pp, vpp)
    if columns.shape[1] == 0:
        stage = next(s for s in range(pp) if done[s] < stages[s].size)
        at = int(ends[stage] + done[stage])
        way, step = ("before", -1) if kind[at] == 0 else ("after", 1)
        raise PlanError(
            f"stage {stage} cannot run {known[kind[at], chunk[at], microbatch[at]]}: the same "
            f"operation in the chunk {way} it, {microbatch[at]}{KINDS[kind[at]]} of model chunk "
            f"{model_chunk[at] + step}, waits for what comes later in the order; give an order "
            "without a circle"
        )
    return order_of(columns, pp)


def _unknown(text: str, stage: int, vpp: int, num_microbatches: int) -> PlanError:
    """The error about a text that is no operation of the stage."""
    if re.fullmatch(rf"(0|[1-9][0-9]*)[{KINDS}](0|[1-9][0-9]*)", text):
        return PlanError(
            f"stage {stage} cannot run {text:.60}: there are {num_microbatches} micro-batches "
            f"and {vpp} chunks per stage"
        )
    return PlanError(
        f"stage {stage} has the operation {brief(text)}; write micro-batch, one of {KINDS}, "
        "chunk, such as 2F0"
    )


def _wrong_place(own: Ints, known: npt.NDArray[np.object_], chains: Chains) -> str:
    """What is wrong with a stage's own order; "" if nothing is.

    Args:
        own: its operations, as indices into `known`, see `operation_texts`.
    """
    last = np.full(known.size, -1)
    last[own] = np.arange(own.size)
    (again,) = np.nonzero(last[own] != np.arange(own.size))
    if again.size:
        return f"runs {known.flat[own[again[0]]]} twice; name each operation once"
    place = last.reshape(known.shape)
    missing = np.argwhere(place[:2] < 0)
    if missing.size:
        return f"never runs {known[tuple(missing[0])]}; add it to its line"
    every = list(range(known.shape[2]))
    pieces = [k for chain in chains for k in chain[1:]]
    before = [k - 1 for k in pieces]
    # A kind of operations of micro-batches, and those that come after them.
    for first, of_first, then, of_then, what in (
        (0, every, 1, every, "its forward"),
        (1, every, 2, every, "its backward"),
        (0, before, 0, pieces, "the piece before it,"),
        (1, pieces, 1, before, "the backward of the next piece,"),
    ):
        later = place[then][:, of_then]
        wrong = np.argwhere((later >= 0) & (later < place[first][:, of_first]))
        if wrong.size:
            chunk, k = wrong[0]
            names = known[then, chunk, of_then[k]], known[first, chunk, of_first[k]]
            return f"cannot run {names[0]}: {what} {names[1]} comes later"
    return ""
