"""Reads the text of an order, and checks that it can run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megapack.errors import PlanError, brief
from megapack.plan.order import (
    KINDS,
    Chains,
    Operation,
    StepOrder,
    interleave,
    operation_texts,
    order_of,
)


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
        if not _is_plain(texts, codes, known.shape, chains):
            texts = _checked(texts, stage, vpp, num_microbatches, chains)
        stages.append(np.array([codes[text] for text in texts], dtype=np.int64))
    kind, chunk, microbatch = np.unravel_index(np.concatenate(stages), known.shape)
    ends = np.cumsum([0, *(own.size for own in stages)])
    model_chunk = chunk * pp + np.repeat(np.arange(pp), np.diff(ends))
    columns, done = interleave(np.stack([kind, microbatch, model_chunk]), ends, pp, vpp)
    if columns.shape[1] == 0:
        stage = next(s for s in range(pp) if done[s] < stages[s].size)
        op = _read_operation(known.flat[stages[stage][done[stage]]], stage, vpp, num_microbatches)
        way = ("before", -1) if op.kind == "F" else ("after", 1)
        raise PlanError(
            f"stage {stage} cannot run {op}: the same operation in the chunk {way[0]} it, "
            f"{op.microbatch}{op.kind} of model chunk {op.chunk * pp + stage + way[1]}, waits for "
            "what comes later in the order; give an order without a circle"
        )
    return order_of(columns, pp)


def _is_plain(
    texts: Sequence[str], codes: dict[str, int], shape: tuple[int, ...], chains: Chains
) -> bool:
    """Whether a stage's operations are written as plans write them, and its own order is right."""
    found = [codes.get(text, -1) for text in texts]
    place = np.full(shape, -1)
    place.flat[found] = np.arange(len(found))
    forward, backward, weights = place
    continues = [k for chain in chains for k in chain[1:]]
    continued = [k - 1 for k in continues]
    return (
        -1 not in found
        and np.count_nonzero(place >= 0) == len(found)
        and bool((forward >= 0).all())
        and bool((backward > forward).all())
        and bool(((weights < 0) | (weights > backward)).all())
        and bool((forward[:, continues] > forward[:, continued]).all())
        and bool((backward[:, continues] < backward[:, continued]).all())
    )


def _checked(
    texts: Sequence[str], stage: int, vpp: int, num_microbatches: int, chains: Chains
) -> list[str]:
    """A stage's operations as plans write them; raises PlanError, which names what is wrong."""
    operations = [_read_operation(text, stage, vpp, num_microbatches) for text in texts]
    _check_stage(operations, stage, vpp, num_microbatches, chains)
    return [str(op) for op in operations]


def _read_operation(text: str, stage: int, vpp: int, num_microbatches: int) -> Operation:
    microbatch, kind, chunk = (text[:1], "", "")
    for letter in KINDS:
        if letter in text:
            kind = letter
            microbatch, _, chunk = text.partition(letter)
    if not kind or not (microbatch.isdecimal() and chunk.isdecimal()):
        raise PlanError(
            f"stage {stage} has the operation {brief(text)}; write micro-batch, one of {KINDS}, "
            "chunk, such as 2F0"
        )
    op = Operation(kind, int(microbatch), int(chunk))
    if op.microbatch >= num_microbatches or op.chunk >= vpp:
        raise PlanError(
            f"stage {stage} cannot run {op}: there are {num_microbatches} micro-batches and "
            f"{vpp} chunks per stage"
        )
    return op


def _check_stage(
    operations: Sequence[Operation],
    stage: int,
    vpp: int,
    num_microbatches: int,
    chains: Chains,
) -> None:
    """Check what a stage's own order decides; raises PlanError."""
    place: dict[Operation, int] = {}
    for index, op in enumerate(operations):
        if op in place:
            raise PlanError(f"stage {stage} runs {op} twice; name each operation once")
        place[op] = index
    before = {k: k - 1 for chain in chains for k in chain[1:]}
    for chunk in range(vpp):
        for k in range(num_microbatches):
            forward = Operation("F", k, chunk)
            backward = Operation("B", k, chunk)
            weights = Operation("W", k, chunk)
            for op in (forward, backward):
                if op not in place:
                    raise PlanError(f"stage {stage} never runs {op}; add it to its line")
            _check_after(place, forward, backward, stage, "its forward")
            if weights in place:
                _check_after(place, backward, weights, stage, "its backward")
            if k in before:
                piece = before[k]
                earlier = Operation("F", piece, chunk)
                _check_after(place, earlier, forward, stage, "the piece before it,")
                later = Operation("B", piece, chunk)
                _check_after(place, backward, later, stage, "the backward of the next piece,")


def _check_after(
    place: dict[Operation, int], first: Operation, then: Operation, stage: int, what: str
) -> None:
    if place[then] < place[first]:
        raise PlanError(f"stage {stage} cannot run {then}: {what} {first} comes later")
