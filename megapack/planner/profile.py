"""How large each micro-batch of a rank should be: the target profile.

Equal micro-batches are not the best: stages wait for the first ones while the pipeline fills, and
for the last ones while it drains. Small micro-batches at both ends shorten both waits. A pattern
search finds the sizes in the simulator, for one rank and divisible work; samples are packed to them
afterwards.

The first levels below were chosen by hand, for medium-sized steps. docs/planner.md measures what
they give: the column search=0 uses them as they are, and the default search starts from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.layout import Layout
from megapack.pipeline.kernels import RankOps, rank_seconds
from megapack.pipeline.simulator import Runner

# 1F1B: levels of the first two and of the last two micro-batches, relative to the middle ones. M=12
# on pp=4 starts at 0.4, 0.65, 1 (eight times), 0.85, 0.65.
_HEAD = (0.4, 0.65)
_TAIL = (0.85, 0.65)
# Where stages run ahead: the first level, and the growth of the next ones: 1 plus this over pp - 1.
# With pp=4 they are 0.15, 0.21, 0.31, 0.44, 0.63, 0.9 and 1.
_RAMP_FIRST = 0.15
_RAMP_GROWTH = 1.3
# 1F1B: levels of the three micro-batches on either side of the huge samples, the nearest first.
# M=20 on pp=4 has two huge samples at 10 and 11; 9 and 12 start at 1.8, 8 and 13 at 1.4, 7 and 14
# at 1.15.
_SLOPES = (1.8, 1.4, 1.15)
# Interleaved: levels of the first and of the last group, and those between which the other groups
# fall. Six groups start at 0.45, 1.22, 1.14, 1.06, 0.98, 0.6.
_FIRST_GROUP = 0.45
_LAST_GROUP = 0.6
_GROUP_SLOPE = (1.3, 0.9)
# Interleaved: levels of both groups if there are only two.
_TWO_GROUPS = (1.2, 0.8)
# Interleaved: most levels, as each costs up to two simulations per round of the search. M=48 with
# G=4 has 12 groups, and the ten in the middle share six levels.
_MAX_GROUP_LEVELS = 8
# The search first scales a level by 1.25 and by 1 / 1.25. The step halves after a round that gains
# nothing: after three of them it scales by 1.03.
_FIRST_STEP = 0.25
# Relative gain that a trial must reach: more than the rounding of fp64 (1e-16 per operation).
_LEAST_GAIN = 1e-9
# Limit on passes of `_fill`. Chosen by hand.
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

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.classes.size

    def targets(self, work: float, huge: Floats, cap: float) -> Floats:
        """Target work of each micro-batch.

        Args:
            work: of all micro-batches together, in any unit.
            huge: work of the samples that get a micro-batch each, in descending order.
            cap: most work of a micro-batch without a huge sample.

        Returns:
            float64 [M]; its sum is `work`, or the sum of `huge` if that is more.
        """
        sizes = np.empty(self.classes.size)
        floors = _floors(self.huge_order, huge)
        _fill(self.classes, self.levels, floors, work, max(cap, work / sizes.size), sizes)
        return sizes


def default_profile(layout: Layout, count: int, num_huge: int) -> Profile:
    """The profile that the search starts with.

    Args:
        count: M.
        num_huge: samples that get a micro-batch each.
    """
    return Profile(*_classes(layout, count, num_huge), np.inf, 0)


def find_profile(
    runner: Runner,
    count: int,
    *,
    work: float,
    fixed: float,
    cap: float,
    huge: Floats,
    rounds: int,
) -> Profile:
    """The fastest profile found in the simulator. All work but the huge samples is divisible.

    Args:
        count: M.
        work: seconds of the forward of all of a rank's rows through one chunk, without `fixed`.
        fixed: seconds that each micro-batch adds.
        cap: largest work of one micro-batch: that of a full row.
        huge: work of the samples that get a micro-batch each, in descending order.
        rounds: rounds of the pattern search; each tries every level.
    """
    classes, levels, huge_order = _classes(runner.layout, count, huge.size)
    ops = runner.ops(count)
    floors = _floors(huge_order, huge)
    cap = max(cap, work / count)
    seconds, used = _search(ops, classes, levels, floors, work, cap, fixed, rounds)
    return Profile(classes, levels, huge_order, float(seconds), int(used))


def _floors(huge_order: Ints, huge: Floats) -> Floats:
    """Least work of each micro-batch: that of its huge sample, or 0."""
    floors = np.zeros(huge_order.size)
    huge = huge[: huge_order.size]
    floors[huge_order[: huge.size]] = huge
    return floors


def _classes(layout: Layout, count: int, num_huge: int) -> tuple[Ints, Floats, Ints]:
    """Which micro-batches share a level, and the levels that the search starts with.

    1F1B: each of the first and last pp micro-batches has its own level, and so have those beside
    the huge samples in the middle. Interleaved: the micro-batches of a group share a level, and
    huge samples go to the groups after the first one.

    Returns:
        classes, levels, huge_order: as in `Profile`.
    """
    if layout.pp == 1:
        return np.zeros(count, dtype=np.int64), np.ones(1), np.arange(count)
    if layout.vpp == 1:
        return _mountain(layout.pp, count, num_huge)
    return _grouped(count, layout.group_size)


def _grouped(count: int, group: int) -> tuple[Ints, Floats, Ints]:
    """`_classes` of the interleaved schedule."""
    position = np.arange(count)
    groups = position // group
    last = int(groups[-1])
    huge_order = np.concatenate([position[groups > 0], position[groups == 0]])
    if last >= _MAX_GROUP_LEVELS:
        middle = 1 + (groups - 1) * (_MAX_GROUP_LEVELS - 2) // (last - 1)
        after_first = np.where(groups == last, _MAX_GROUP_LEVELS - 1, middle)
        groups = np.where(groups == 0, 0, after_first)
        last = _MAX_GROUP_LEVELS - 1
    levels = np.linspace(*_GROUP_SLOPE, last + 1)
    if last == 1:
        levels[:] = _TWO_GROUPS
    elif last > 1:
        levels[0] = _FIRST_GROUP
        levels[-1] = _LAST_GROUP
    return groups, levels, huge_order


def _mountain(pp: int, count: int, num_huge: int) -> tuple[Ints, Floats, Ints]:
    """`_classes` of 1F1B: sizes rise from both ends towards the huge samples in the middle."""
    position = np.arange(count)
    ends = min(pp, (count - 1) // 2)
    classes = np.minimum(position, ends) + np.maximum(position - (count - 1 - ends), 0)
    levels = _mountain_levels(2 * ends + 1)
    # From the middle outwards; M=11: 5 6 4 7 3 ...
    from_middle = np.abs(position - count // 2) * 2 - (position > count // 2)
    huge_order = np.argsort(from_middle, kind="stable")
    if num_huge:
        beside = huge_order[num_huge : num_huge + 2 * len(_SLOPES)]
        slopes = [p for p in beside if classes[p] == ends]
        for k, p in enumerate(slopes):
            classes[p] = levels.size + k
        levels = np.concatenate([levels, np.repeat(_SLOPES, 2)[: len(slopes)]])
    return classes, levels, huge_order


def _mountain_levels(size: int) -> Floats:
    """Levels of so many classes: the first two and the last two are lower."""
    levels = np.ones(size)
    near = min(2, (size - 1) // 2)
    levels[:near] = _HEAD[:near]
    levels[size - near :] = _TAIL[2 - near :]
    return levels


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
    _fill(classes, levels, floors, work, cap, sizes)
    best = rank_seconds(ops, sizes + fixed, end)
    used = 1
    step = _FIRST_STEP
    for _ in range(rounds):
        improved = False
        for c in range(levels.size):
            old = levels[c]
            for factor in (1 + step, 1 / (1 + step)):
                levels[c] = old * factor
                _fill(classes, levels, floors, work, cap, sizes)
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
def _fill(
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
