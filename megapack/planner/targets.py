"""How long each row should take: targets of every rank's micro-batches, float64 [dp, M].

Equal micro-batches are not the best: stages wait for the first ones while the pipeline fills, and
for the last ones while it drains. Small micro-batches at both ends shorten both waits. A pattern
search finds the profile, the sizes of a rank's micro-batches, in the simulator, for divisible work;
samples are packed to them afterwards.

A huge sample slows its rank down: no row beside it can be as long. The profile is found for the
rank with the largest ones, which have rows of their own; the other ranks fill the same profile.

The first levels below were chosen by hand, for medium-sized steps: docs/measured/planner_peers.md
has what they give (search=0), and the search starts there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.layout import Layout
from megapack.pipeline.kernels import RankOps, rank_seconds
from megapack.pipeline.simulator import Runner
from megapack.planner.scored import Way

# 1F1B: levels of the first two and of the last two micro-batches, relative to the middle ones. M=12
# on pp=4 starts at 0.4, 0.65, 1 (eight times), 0.85, 0.65.
_HEAD = (0.4, 0.65)
_TAIL = (0.85, 0.65)
# Where stages run ahead: the first level, and the growth of the next ones: 1 plus this over pp - 1.
# With pp=4 they are 0.15, 0.21, 0.31, 0.44, 0.63, 0.9 and 1.
_RAMP_FIRST = 0.15
_RAMP_GROWTH = 1.3
# Interleaved: levels of the first and of the last group.
_END_GROUPS = (0.45, 0.6)
# Interleaved: most levels, as each costs up to two simulations per round of the search. M=48 with
# G=4 has 12 groups, and the ten in the middle share six levels.
_MAX_GROUP_LEVELS = 8
# The search first scales a level by 1.25 and by 1 / 1.25. The step halves after a round that gains
# nothing: after three of them it scales by 1.03.
_FIRST_STEP = 0.25
# Relative gain that a trial must reach: more than the rounding of fp64 (1e-16 per operation).
_LEAST_GAIN = 1e-9
# Limit on passes of `spread`. Chosen by hand.
_FILL_PASSES = 8


@dataclass(frozen=True)
class Profile:
    """Target sizes of one rank's M micro-batches, relative to each other."""

    classes: Ints
    """int64 [M]: the class of each micro-batch; those of one class have one level."""
    levels: Floats
    """float64 [classes]: relative size of the micro-batches of each class."""
    huge_order: Ints
    """int64 [M]: positions of micro-batches in the order in which huge samples get them."""
    seconds: float
    """Simulated seconds for divisible work; inf if not simulated."""
    evaluations: int
    """Simulations spent."""

    def sizes(self, work: float, huge: Floats, cap: float) -> Floats:
        """Work of each micro-batch.

        Args:
            work: of all micro-batches together, in any unit.
            huge: work of the samples that get a micro-batch each, in descending order.
            cap: most work of a micro-batch without a huge sample.

        Returns:
            float64 [M]; its sum is `work`, or the sum of `huge` if that is more.
        """
        sizes = np.empty(self.classes.size)
        floors = _floors(self.huge_order, huge)
        spread(self.classes, self.levels, floors, work, max(cap, work / sizes.size), sizes)
        return sizes


@dataclass(frozen=True)
class Target:
    """A profile, and what it was made for."""

    huge: list[Floats]
    """Per rank the work of the samples that get a micro-batch each, in descending order."""
    profile: Profile

    @property
    def seconds(self) -> float:
        """Simulated seconds for divisible work; inf if not simulated."""
        return self.profile.seconds

    @property
    def count(self) -> int:
        """M."""
        return int(self.profile.classes.size)

    def rows(self, way: Way) -> Floats:
        """float64 [dp, M]: work that each row should have."""
        return np.stack([self.profile.sizes(way.rank_work, own, way.cap) for own in self.huge])


def equal_target(way: Way, count: int, rounds: int) -> Target:
    """The target of M with equal work for all ranks.

    Args:
        rounds: see `find_profile`; 0: the profile is not searched.
    """
    huge = _huge_samples(way, count)
    return Target(huge, _profile(way, count, rounds, huge[0]))


def ramp_targets(way: Way, held: Floats) -> Floats:
    """float64 [dp, M]: work that each row should have where stages run forwards ahead, at least
    what it holds already.

    With 5 rows of level 1, 10 s of work and a piece of 4 s in the third one, the others share 6 s.
    """
    count = held.shape[1]
    drains = way.step.policy.backward == "joint" or way.step.forward_only
    levels = ramp_levels(count, way.layout.pp, drains=drains)
    targets = np.empty_like(held)
    for own, floors in zip(targets, held, strict=True):
        spread(np.arange(count), levels, floors, way.rank_work, np.inf, own)
    return targets


def snake(size: int, num_ranks: int) -> Ints:
    """int64 [size]: ranks of things in descending order, so that all get about equal sums: one
    each, and then one each in reverse.

    >>> snake(8, 3)
    array([0, 1, 2, 2, 1, 0, 0, 1])
    """
    turn = np.arange(size) % (2 * num_ranks)
    return np.minimum(turn, 2 * num_ranks - 1 - turn)


def _huge_samples(way: Way, count: int) -> list[Floats]:
    """Per rank the work of its items of more than a mean row, in descending order.

    All ranks have none if they have the same targets: ranks in lockstep, or rows of one length.
    Rows over several ranks hold huge samples without being long.
    """
    dp = way.layout.dp
    is_uniform = way.step.policy.row_shape == "uniform"
    if way.step.lockstep or is_uniform or way.num_levels > 1:
        return [np.zeros(0)] * dp
    heavy = -np.sort(-way.work[way.work > way.rank_work / count])
    rank_of = snake(heavy.size, dp)
    by_rank = heavy[np.argsort(rank_of, kind="stable")]
    own = np.split(by_rank, np.cumsum(np.bincount(rank_of, minlength=dp))[:-1])
    # Two micro-batches are left for the other items.
    return [work[: max(count - 2, 0)] for work in own]


def _profile(way: Way, count: int, rounds: int, huge: Floats) -> Profile:
    """The profile of a rank with the mean work and these huge samples."""
    is_flat = way.layout.pp == 1 or way.step.policy.row_shape == "uniform"
    return find_profile(
        # Work is divisible, and each part has the mean share of squares.
        way.runner.for_shares(way.items.square_share),
        count,
        work=way.rank_work,
        fixed=float(way.cost.fixed),
        cap=way.cap,
        huge=huge,
        rounds=0 if is_flat else rounds,
    )


def find_profile(
    runner: Runner, count: int, *, work: float, fixed: float, cap: float, huge: Floats, rounds: int
) -> Profile:
    """The fastest profile found in the simulator. All work but the huge samples is divisible.

    Args:
        count: M.
        work: seconds of the forward of all of a rank's rows through one chunk, without `fixed`.
        fixed: seconds that each micro-batch adds.
        cap: largest work of one micro-batch: that of a full row.
        huge: work of the samples that get a micro-batch each, in descending order.
        rounds: rounds of the pattern search; each tries every level. 0: the first levels.
    """
    classes, levels, huge_order = _classes(runner.layout, count)
    if not rounds:
        return Profile(classes, levels, huge_order, math.inf, 0)
    floors = _floors(huge_order, huge)
    cap = max(cap, work / count)
    seconds, used = _search(runner.ops(count), classes, levels, floors, work, cap, fixed, rounds)
    return Profile(classes, levels, huge_order, float(seconds), int(used))


def _floors(huge_order: Ints, huge: Floats) -> Floats:
    """Least work of each micro-batch: that of its huge sample, or 0."""
    floors = np.zeros(huge_order.size)
    huge = huge[: huge_order.size]
    floors[huge_order[: huge.size]] = huge
    return floors


def _classes(layout: Layout, count: int) -> tuple[Ints, Floats, Ints]:
    """Which micro-batches share a level, and the levels that the search starts with.

    1F1B: each of the first and last pp micro-batches has its own level, and huge samples are in the
    middle. Interleaved: the micro-batches of a group share a level, and huge samples go to the
    groups after the first one.

    Returns:
        classes, levels, huge_order: as in `Profile`.
    """
    position = np.arange(count)
    if layout.pp == 1:
        return np.zeros(count, dtype=np.int64), np.ones(1), position
    if layout.vpp == 1:
        ends = min(layout.pp, (count - 1) // 2)
        classes = np.minimum(position, ends) + np.maximum(position - (count - 1 - ends), 0)
        # From the middle outwards; M=11: 5 6 4 7 3 ...
        from_middle = np.abs(position - count // 2) * 2 - (position > count // 2)
        levels, near = np.ones(2 * ends + 1), min(2, ends)
        levels[:near], levels[levels.size - near :] = _HEAD[:near], _TAIL[2 - near :]
        return classes, levels, np.argsort(from_middle, kind="stable")
    groups = position // layout.group_size
    last = int(groups[-1])
    huge_order = np.concatenate([position[groups > 0], position[groups == 0]])
    if last >= _MAX_GROUP_LEVELS:
        middle = 1 + (groups - 1) * (_MAX_GROUP_LEVELS - 2) // (last - 1)
        after_first = np.where(groups == last, _MAX_GROUP_LEVELS - 1, middle)
        groups = np.where(groups == 0, 0, after_first)
        last = _MAX_GROUP_LEVELS - 1
    levels = np.ones(last + 1)
    if last > 1:
        levels[[0, -1]] = _END_GROUPS
    return groups, levels, huge_order


def ramp_levels(count: int, pp: int, *, drains: bool) -> Floats:
    """Levels of M micro-batches whose stages run forwards ahead, float64 [M].

    Small first ones are soon on the last stage. The next one may be (pp + 1) / (pp - 1) times as
    large before the last stage has to wait for it. With forwards of 1 s and r s, the first one
    arrives there after pp - 1 s and takes 3 s with its backward; the second one arrives after
    1 + (pp - 1) * r s. A smaller growth is better for whole samples.

    Args:
        drains: nothing fills the waits at the end, such as weight gradients, so the last ones are
            smaller, too.
    """
    levels = np.ones(count)
    near = (count - 1) // 2
    level = _RAMP_FIRST
    for k in range(near if pp > 1 else 0):
        levels[k] = min(level, 1.0)
        level *= 1 + _RAMP_GROWTH / (pp - 1)
    if drains:
        size = min(len(_TAIL), near)
        levels[count - size :] = _TAIL[len(_TAIL) - size :]
    return levels


@kernel
def _search(
    ops: RankOps,
    classes: Ints,
    levels: Floats,
    floors: Floats,
    work: float,
    cap: float,
    fixed: float,
    rounds: int,
) -> tuple[float, int]:
    """Pattern search: scale each level up and down by a step; halve the step if nothing helps.

    The best levels are left in `levels`.

    Returns:
        seconds: simulated seconds of the best levels.
        used: simulations spent.
    """
    sizes = np.empty(classes.size)
    end = np.empty(ops.stage.size)
    spread(classes, levels, floors, work, cap, sizes)
    best = rank_seconds(ops, sizes + fixed, end)
    used = 1
    step = _FIRST_STEP
    for _ in range(rounds):
        improved = False
        for c in range(levels.size):
            old = levels[c]
            for factor in (1 + step, 1 / (1 + step)):
                levels[c] = old * factor
                spread(classes, levels, floors, work, cap, sizes)
                seconds = rank_seconds(ops, sizes + fixed, end)
                used += 1
                if seconds < best * (1 - _LEAST_GAIN):
                    best = seconds
                    improved = True
                    break
                levels[c] = old
        if not improved:
            step /= 2
    return best, used


@kernel
def spread(
    classes: Ints, levels: Floats, floors: Floats, work: float, cap: float, sizes: Floats
) -> None:
    """Spread `work` by level over `sizes`, each between its floor and `cap` or its floor if larger.

    Levels 1, 1, 2 with work 8 and cap 3.5 give 2, 2, 4 in the first pass; the last one is fixed at
    3.5, and the second pass gives 2.25, 2.25, 3.5.
    """
    settled = np.zeros(classes.size, dtype=np.bool_)
    for _ in range(_FILL_PASSES):
        rest = work
        weight = 0.0
        for k in range(classes.size):
            if settled[k]:
                rest -= sizes[k]
            else:
                weight += levels[classes[k]]
        changed = False
        for k in range(classes.size):
            if not settled[k]:
                sizes[k] = max(levels[classes[k]] * rest / weight, 0.0)
                limit = max(cap, floors[k])
                if sizes[k] > limit or sizes[k] < floors[k]:
                    sizes[k] = limit if sizes[k] > limit else floors[k]
                    settled[k] = True
                    changed = True
        if not changed:
            break
