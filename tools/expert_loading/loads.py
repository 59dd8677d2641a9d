"""Load of experts by sample, and the seconds of plans that know it or do not.

Ranks of an expert-parallel (EP) group exchange tokens in every layer, so their k-th micro-batches
run in lockstep: a layer's experts take as long as the rank with most choices. n samples, L MoE
layers, E experts, ep ranks per group; a step has S slots, one per EP group and position in the
order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megapack import Plan

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def expert_counts(routes: Ints, num_experts: int) -> Ints:
    """Choices of a sample by layer and expert, int64 [L, E].

    Args:
        routes: chosen experts, [tokens, L, choices per token].
    """
    num_layers = routes.shape[1]
    keys = routes.astype(np.int64) + num_experts * np.arange(num_layers)[None, :, None]
    counts = np.bincount(keys.ravel(), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts)


def rank_loads(counts: Ints | Floats, ep: int) -> Floats:
    """Choices by layer and EP rank, [n, L, ep]; rank 0 holds the first E / ep experts.

    Args:
        counts: [n, L, E].
    """
    n, num_layers, num_experts = counts.shape
    return counts.reshape(n, num_layers, ep, num_experts // ep).sum(3).astype(np.float64)


@dataclass(frozen=True)
class Assignment:
    """Where the samples of a step run.

    Args:
        slot: int64 [n], EP group * M + position in the order.
        rank: int64 [n], rank inside of the EP group.
        num_slots, ep, num_groups: S, ranks of a group, groups.
        capacity: tokens that a row may hold.
    """

    slot: Ints
    rank: Ints
    num_slots: int
    ep: int
    num_groups: int
    capacity: int


def assignment(plan: Plan, capacity: int) -> Assignment:
    """The assignment of a plan of one step whose EP groups are consecutive DP ranks."""
    (step,) = plan.steps
    ep = plan.layout.ep
    slot = np.zeros(plan.num_samples, dtype=np.int64)
    rank = np.zeros(plan.num_samples, dtype=np.int64)
    for dp_rank, rows in enumerate(step.ranks):
        for position, row in enumerate(rows):
            samples = list(row.samples)
            slot[samples] = dp_rank // ep * step.num_microbatches + position
            rank[samples] = dp_rank % ep
    num_groups = plan.layout.dp // ep
    num_slots = num_groups * step.num_microbatches
    return Assignment(slot, rank, num_slots, ep, num_groups, capacity)


def slot_loads(loads: Floats, slot: Ints, num_slots: int) -> Floats:
    """Choices of a slot's samples, [S, L, ep], of loads [n, L, ep]."""
    total = np.zeros((num_slots, *loads.shape[1:]))
    np.add.at(total, slot, loads)
    return total


@dataclass(frozen=True)
class Waits:
    """Choices that the experts of a step wait for, over those of perfect balance, minus 1."""

    plan: float
    """The plan's: the busiest EP rank of each slot and layer."""
    bound: float
    """What no plan of these samples can go below: the busiest EP rank of the whole step. A mix of
    samples cannot change a layer's totals, and sums of maxima are at least the maximum of sums."""


def waits(loads: Floats, where: Assignment) -> Waits:
    """Waits of an assignment.

    One layer, two ranks, slots with loads (6, 2) and (3, 5): the step waits for 6 + 5 = 11 choices
    of 8 on average, 0.375; totals (9, 7) allow 9, 0.125.
    """
    mean = loads.sum() / where.ep
    busiest = slot_loads(loads, where.slot, where.num_slots).max(2).sum()
    return Waits(plan=busiest / mean - 1, bound=loads.sum(0).max(1).sum() / mean - 1)


class LockstepTime:
    """Seconds of assignments, 1 = all ranks equally busy in every layer.

    A slot takes its longest row's tokens for the dense part of the layers, and the busiest EP rank
    of each layer for experts; a step takes its slowest EP group's sum. Without a pipeline, so that
    nothing hides in bubbles.

    Args:
        tokens: int64 [n].
        loads: [n, L, ep], what experts really get, or what a planner believes.
        share: part of the seconds that perfectly balanced experts take.
    """

    def __init__(self, tokens: Ints, loads: Floats, share: float, where: Assignment) -> None:
        num_ranks = where.ep * where.num_groups
        self.dense = tokens * ((1 - share) * num_ranks / tokens.sum())
        self.loads = loads * (share * num_ranks / loads.sum())
        self.where = where

    def of_slots(self, dense: Floats, loads: Floats) -> Floats:
        """Seconds of slots with `dense` [..., ep] and `loads` [..., L, ep]."""
        return dense.max(-1) + loads.max(-1).sum(-1)

    def tables(self, slot: Ints, rank: Ints) -> tuple[Floats, Floats]:
        """Dense seconds [S, ep] and expert seconds [S, L, ep] of an assignment."""
        dense = np.zeros((self.where.num_slots, self.where.ep))
        np.add.at(dense, (slot, rank), self.dense)
        return dense, slot_loads(self.loads, slot, self.where.num_slots)

    def step(self, slot: Ints, rank: Ints) -> float:
        """Seconds of the step."""
        seconds = self.of_slots(*self.tables(slot, rank))
        return float(seconds.reshape(self.where.num_groups, -1).sum(1).max())


# A step of 256 samples has 33,000 pairs; after this many exchanges few still help.
NUM_EXCHANGES = 30_000


def search(
    tokens: Ints,
    believed: Floats,
    share: float,
    start: Assignment,
    *,
    seed: int = 0,
    num_exchanges: int = NUM_EXCHANGES,
) -> tuple[Ints, Ints]:
    """Exchange samples between rows while that makes the step faster; slots and ranks.

    Args:
        believed: [n, L, ep], loads that the search knows. Equal shares of experts make it blind.
        start: where samples are before.
        num_exchanges: pairs that are tried.
    """
    time = LockstepTime(tokens, believed, share, start)
    slot = start.slot.copy()
    rank = start.rank.copy()
    dense, loads = time.tables(slot, rank)
    filled = np.zeros(dense.shape, dtype=np.int64)
    np.add.at(filled, (slot, rank), tokens)
    seconds = time.of_slots(dense, loads)
    per_group = start.num_slots // start.num_groups
    groups = seconds.reshape(-1, per_group).sum(1)
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, tokens.size, (num_exchanges, 2))
    for a, b in pairs.tolist():
        s, t = slot[a], slot[b]
        p, q = rank[a], rank[b]
        if s == t and p == q:
            continue
        longer = tokens[b] - tokens[a]
        if max(filled[s, p] + longer, filled[t, q] - longer) > start.capacity:
            continue
        more = time.dense[b] - time.dense[a]
        rows = np.array((s, t) if s != t else (s,))
        new_dense = dense[rows]
        new_loads = loads[rows]
        new_dense[0, p] += more
        new_dense[-1, q] -= more
        if s != t:
            change = time.loads[b] - time.loads[a]
            new_loads[0] += change
            new_loads[1] -= change
        new_seconds = time.of_slots(new_dense, new_loads)
        new_groups = groups.copy()
        np.add.at(new_groups, rows // per_group, new_seconds - seconds[rows])
        # The mean counts a little, so that groups other than the slowest become faster as well.
        gain = groups.max() - new_groups.max() + 0.01 * (groups.mean() - new_groups.mean())
        if gain <= 1e-12:
            continue
        dense[rows], loads[rows], seconds[rows] = new_dense, new_loads, new_seconds
        groups = new_groups
        filled[s, p] += longer
        filled[t, q] -= longer
        slot[a], slot[b], rank[a], rank[b] = t, s, q, p
    return slot, rank


def believed_counts(counts: Ints, groups: Ints, knows: str) -> Floats:
    """Counts [n, L, E] that a planner would take for the real ones.

    Args:
        groups: int64 [n], prompt group of each sample.
        knows: "routes": each sample's own; "group": shares of the other samples of its prompt
            group; "step": shares of all samples, as counts per expert give them; "nothing": equal
            shares.
    """
    if knows == "routes":
        return counts.astype(np.float64)
    choices = counts.sum(2, keepdims=True)
    total = counts.sum(0, keepdims=True).astype(np.float64)
    if knows == "nothing":
        shares = np.full_like(total, 1 / counts.shape[2])
    else:
        shares = total / total.sum(2, keepdims=True)
    shares = np.repeat(shares, len(counts), 0)
    if knows == "group":
        for group in np.unique(groups):
            own = np.flatnonzero(groups == group)
            others = counts[own].sum(0) - counts[own]
            known = others.sum((1, 2)) > 0
            shares[own[known]] = (others / np.maximum(others.sum(2, keepdims=True), 1))[known]
    return choices * shares


def concentration(counts: Ints) -> float:
    """How much samples differ, as the c of Dirichlet(c * E * mean share) that differ as much.

    A share p of mean m has the variance m (1 - m) / (c E + 1); drawing t choices adds about
    p (1 - p) / t, which is taken off. Small c: each sample has its own experts.
    """
    choices = counts.sum(2, keepdims=True).astype(np.float64)
    shares = counts / choices
    mean = counts.sum(0) / choices.sum(0)
    spread = (mean * (1 - mean)).sum()
    weights = choices / choices.sum(0)
    variance = (weights * (shares - mean) ** 2).sum()
    noise = (weights * shares * (1 - shares) / choices).sum()
    variance = max(variance - noise, 1e-9)
    return float((spread / variance - 1) / counts.shape[2])


def drawn_counts(
    tokens: Ints,
    num_layers: int,
    num_experts: int,
    top_k: int,
    c: float,
    *,
    num_kinds: int,
    seed: int,
) -> Ints:
    """Counts [n, L, E] of samples whose shares are drawn from a Dirichlet distribution of equal
    means; see `concentration`.

    Args:
        num_kinds: kinds of samples, each with shares of its own in every layer; n: all samples
            differ.
    """
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(num_experts, c), (num_kinds, num_layers))
    kinds = rng.permutation(np.arange(tokens.size) % num_kinds)
    choices = tokens[:, None] * np.full(num_layers, top_k)
    return rng.multinomial(choices, shares[kinds])
