"""Random orders of operations, each legal."""

from __future__ import annotations

import random
from collections.abc import Sequence

from megapack.plan.order import without_weights


def random_order(
    rng: random.Random, *, pp: int, vpp: int, num_microbatches: int, split: float
) -> tuple[str, ...]:
    """A legal order of one DP rank: one line per stage, as `StepOrder.lines`.

    Operations are drawn one by one among those that can run.

    Args:
        split: probability that a backward leaves its weight gradients to a W.
    """
    last = pp * vpp - 1
    ready = [("F", k, 0) for k in range(num_microbatches)]
    lines: list[list[str]] = [[] for _ in range(pp)]
    # A stage that prefers one kind of operation for a while makes orders like GPipe's or 1F1B's.
    weights = {kind: rng.random() + 0.05 for kind in "FBW"}
    while ready:
        chances = [weights[kind] for kind, _, _ in ready]
        op = rng.choices(ready, chances)[0]
        ready.remove(op)
        kind, microbatch, chunk = op
        lines[chunk % pp].append(f"{microbatch}{kind}{chunk // pp}")
        if kind == "F":
            ready.append(("F", microbatch, chunk + 1) if chunk < last else ("B", microbatch, last))
        elif kind == "B":
            if chunk > 0:
                ready.append(("B", microbatch, chunk - 1))
            if rng.random() < split:
                ready.append(("W", microbatch, chunk))
    return tuple(" ".join(line) for line in lines)


def with_random_weights(rng: random.Random, lines: Sequence[str]) -> tuple[str, ...]:
    """The lines of an order, with weight gradients of some backwards at random places."""
    made = []
    for line in lines:
        own = without_weights(line).split()
        for backward in [text for text in own if "B" in text and rng.random() < 0.6]:
            place = rng.randint(own.index(backward) + 1, len(own))
            own.insert(place, backward.replace("B", "W"))
        made.append(" ".join(own))
    return tuple(made)
