"""Ranks with unequal work: those with long samples get less, and more of it before and after them.

A huge sample slows its rank down: no row beside it can be as long, so stages wait. With equal work
that rank is the last to end, and more micro-batches help it little. With less work for it, the
others take more, at an M that suits them. On pp=4, a sample of a quarter of a rank's work leaves
0.7 of the work to its rank at M=18, and 1.1 to three others.

Two kinds of ranks are told apart: heavy ones, whose largest sample is at least half of the largest
of all, and light ones. Each kind has a profile, and shares of the work with which both end at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megapack.base.arrays import Floats
from megapack.pipeline.kernels import RankOps, rank_seconds
from megapack.planner.profile import Profile

# Times that the shares are changed towards equal seconds: 1.4 s and 1.0 s become 1.13 s and 1.10 s
# after the first, and differ by less than 1 % after the third. Chosen by hand.
_STEPS = 4
# A rank keeps at least 1 % of a mean rank's work.
_LEAST_SHARE = 0.01


@dataclass(frozen=True)
class UnevenRanks:
    """Profiles and shares of heavy and light ranks."""

    profiles: tuple[Profile, Profile]
    """Of heavy ranks, which come first, and of light ones."""
    num_heavy: int
    shares: Floats
    """float64 [dp]: each rank's share of the work; their mean is 1."""
    seconds: float
    """Simulated seconds of the slower kind, for divisible work."""
    evaluations: int
    """Simulations spent, without those of a profile that was known."""


def concentrated(heavy: Floats, dp: int, most: int) -> list[Floats]:
    """The heaviest samples on the first rank, the next on the second, with equal sums of work.

    The other ranks have no long samples then, and all long ones rise and fall beside each other.

    Args:
        heavy: float64 [H], work in descending order.
        most: samples that a rank may have; further ones are left out.

    Returns:
        Per rank the work of its samples, in descending order.
    """
    ends = np.cumsum(heavy)
    if not ends.size:
        return [heavy] * dp
    rank_of = ((ends - heavy / 2) * dp / ends[-1]).astype(np.int64)
    # The first one is on the first rank, even if it has more than a rank's part.
    rank_of -= rank_of[0]
    parts = np.split(heavy, np.searchsorted(rank_of, np.arange(1, dp)))
    return [part[:most] for part in parts]


def find_uneven(
    find: Callable[[float, Floats], Profile],
    ops: RankOps,
    huge: list[Floats],
    *,
    work: float,
    fixed: float,
    cap: float,
    heavy_profile: Profile | None = None,
) -> UnevenRanks | None:
    """Profiles and shares with which heavy and light ranks end together; None if all are heavy.

    Args:
        find: finds the profile of a rank with this work and these huge samples.
        ops: the operations of a rank.
        huge: per rank the seconds of its huge samples, in descending order; the first rank has the
            largest.
        work, fixed, cap: see `profile.find_profile`; the work is that of a mean rank.
        heavy_profile: that of the first rank, if it is known.
    """
    dp = len(huge)
    largest = np.array([own[0] if own.size else 0.0 for own in huge])
    num_heavy = int(np.count_nonzero(2 * largest >= largest[0]))
    if num_heavy == dp:
        return None
    kinds = (huge[0], huge[-1])
    profiles = (heavy_profile or find(work, huge[0]), find(work, huge[-1]))
    evaluations = profiles[1].evaluations
    evaluations += 0 if heavy_profile else profiles[0].evaluations
    counts = (num_heavy, dp - num_heavy)
    shares = best = (1.0, 1.0)
    fewest = math.inf
    end = np.empty(ops.stage.size)
    for _ in range(_STEPS):
        seconds = [
            float(rank_seconds(ops, profile.targets(share * work, kind, cap) + fixed, end))
            for profile, share, kind in zip(profiles, shares, kinds, strict=True)
        ]
        slowest = max(seconds)
        evaluations += 2
        if slowest < fewest:
            best = shares
            fewest = slowest
        mean = (counts[0] * seconds[0] + counts[1] * seconds[1]) / dp
        heavy, light = (
            max(share * (1 - (own - mean) / slowest), _LEAST_SHARE)
            for share, own in zip(shares, seconds, strict=True)
        )
        # The mean of all ranks is 1 again.
        factor = dp / (counts[0] * heavy + counts[1] * light)
        shares = (factor * heavy, factor * light)
    return UnevenRanks(profiles, num_heavy, np.repeat(best, counts), fewest, evaluations)
