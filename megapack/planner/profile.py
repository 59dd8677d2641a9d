"""How large the micro-batches of a pipeline should be, by place: the target profile.

Equal micro-batches are not the best: while the pipeline fills, stages wait for the first ones, and
while it drains, for the last ones. Small micro-batches at both ends shorten both waits. A pattern
search finds the sizes for divisible work, in the simulator and for one rank; samples are packed to
them afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.base.jit import kernel
from megapack.layout import Layout
from megapack.pipeline.kernels import RankOps, rank_seconds
from megapack.pipeline.simulator import Runner

_MAX_GROUPS = 8
# Levels found for middling problems; the search begins with them.
_HEAD, _TAIL = (0.4, 0.65), (0.85, 0.65)
_FIRST_GROUP, _LAST_GROUP, _SLOPE = 0.45, 0.6, (1.3, 0.9)
# Beside the huge samples of 1F1B, on either side.
_SLOPES = (1.8, 1.4, 1.15)


@dataclass(frozen=True)
class Profile:
    """Target sizes of one rank's M micro-batches, relative until work is given."""

    classes: Ints
    """int64 [M]: places of one class have one level."""
    levels: Floats
    """Relative size per class."""
    places: Ints
    """Places in the order in which huge samples take them."""
    seconds: float
    """Simulated seconds for divisible work; inf where not simulated."""
    evaluations: int
    """Simulations spent."""

    def targets(self, work: float, huge: Floats, cap: float) -> Floats:
        """Work of each place.

        Args:
            work: of all places together, in any unit.
            huge: falling, work of samples that take a place of their own.
            cap: most work of a place without a huge sample.

        Returns:
            float64 [M]; its sum is `work`, or that of `huge` where this is more.
        """
        sizes = np.empty(self.classes.size)
        floors = _floors(self.places, huge)
        _fill(self.classes, self.levels, floors, work, max(cap, work / sizes.size), sizes)
        return sizes


def canned_profile(layout: Layout, count: int, group: int, num_huge: int) -> Profile:
    """A profile without simulation.

    Args:
        count: M.
        group: G.
        num_huge: samples that take a place of their own.
    """
    return Profile(*_classes(layout, count, group, num_huge), np.inf, 0)


def find_profile(
    runner: Runner,
    count: int,
    group: int,
    *,
    work: float,
    fixed: float,
    cap: float,
    huge: Floats,
    rounds: int,
) -> Profile:
    """The profile of least simulated seconds, for work that is divisible but for huge samples.

    Args:
        count: M.
        group: G.
        work: seconds of one chunk's forward of all of a rank's work, without `fixed`.
        fixed: seconds that each micro-batch adds.
        cap: most work of one micro-batch (what its row holds).
        huge: falling, work of samples that take a place of their own.
        rounds: sweeps of the pattern search.
    """
    classes, levels, places = _classes(runner.layout, count, group, huge.size)
    ops, floors = runner.ops(count, group), _floors(places, huge)
    cap = max(cap, work / count)
    seconds, used = _search(ops, classes, levels, floors, work, cap, fixed, rounds)
    return Profile(classes, levels, places, float(seconds), int(used))


def _floors(places: Ints, huge: Floats) -> Floats:
    floors = np.zeros(places.size)
    huge = huge[: places.size]
    floors[places[: huge.size]] = huge
    return floors


def _classes(layout: Layout, count: int, group: int, num_huge: int) -> tuple[Ints, Floats, Ints]:
    """Places that share a level, the levels that the search begins with, and where huge samples go.

    1F1B: each of the first and last pp places has its own level, and so have the slopes around the
    huge samples in the middle. Interleaved: groups share a level, and huge samples fill the groups
    after the first one.
    """
    if layout.pp == 1:
        return np.zeros(count, dtype=np.int64), np.ones(1), np.arange(count)
    if layout.vpp == 1:
        return _mountain(layout.pp, count, num_huge)
    place = np.arange(count)
    groups = place // group
    last = int(groups[-1])
    places = np.concatenate([place[groups > 0], place[groups == 0]])
    if last >= _MAX_GROUPS:
        middle = 1 + (groups - 1) * (_MAX_GROUPS - 2) // (last - 1)
        ends_at = np.where(groups == last, _MAX_GROUPS - 1, middle)
        groups, last = np.where(groups == 0, 0, ends_at), _MAX_GROUPS - 1
    levels = np.linspace(*_SLOPE, last + 1)
    if last:
        levels[0], levels[-1] = (1.2, 0.8) if last == 1 else (_FIRST_GROUP, _LAST_GROUP)
    return groups, levels, places


def _mountain(pp: int, count: int, num_huge: int) -> tuple[Ints, Floats, Ints]:
    place = np.arange(count)
    ends = min(pp, (count - 1) // 2)
    classes = np.minimum(place, ends) + np.maximum(place - (count - 1 - ends), 0)
    levels = np.ones(2 * ends + 1)
    near = min(ends, 2)
    levels[:near] = _HEAD[:near]
    levels[levels.size - near :] = _TAIL[2 - near :]
    # From the middle outward: 5 6 4 7 3 ...
    places = np.argsort(np.abs(place - count // 2) * 2 - (place > count // 2), kind="stable")
    if num_huge:
        slopes = [p for p in places[num_huge : num_huge + 2 * len(_SLOPES)] if classes[p] == ends]
        for k, p in enumerate(slopes):
            classes[p] = levels.size + k
        levels = np.concatenate([levels, np.repeat(_SLOPES, 2)[: len(slopes)]])
    return classes, levels, places


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
    """Pattern search: each level up and down by a step that halves when nothing helps."""
    sizes = np.empty(classes.size)
    end = np.empty(ops.stage.size)
    _fill(classes, levels, floors, work, cap, sizes)
    best = rank_seconds(ops, sizes + fixed, end)
    used = 1
    step = 0.25
    for _ in range(rounds):
        improved = False
        for c in range(levels.size):
            old = levels[c]
            for factor in (1 + step, 1 / (1 + step)):
                levels[c] = old * factor
                _fill(classes, levels, floors, work, cap, sizes)
                seconds = rank_seconds(ops, sizes + fixed, end)
                used += 1
                if seconds < best * (1 - 1e-9):
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
    """Spread `work` over places by level, each place between its floor and `cap`."""
    settled = np.zeros(classes.size, dtype=np.bool_)
    for _ in range(8):
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
