"""Tells a rank that is slow for a while from a model that is wrong.

    seconds over the fitted model's, of each rank and step -> steps to leave out, sentences

All DP ranks of a pipeline stage run the same layers, so the model cannot tell them apart: one that
takes longer than the others has a slow GPU or a slow network. A model that is wrong is wrong for
all of them. A stage that takes longer on all of its DP ranks has more work than the model thinks,
and its weight follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megapack.base.arrays import Floats
from megapack.cost.model import CostModel
from megapack.layout import Layout

# A rank's step is slow if it takes this times the seconds of the stage's other DP ranks. With 5 %
# noise in each of 16 rows the steps of two ranks differ by less than 3 %; an H200 that throttles
# loses 10 to 40 %. Chosen by hand.
SLOW_RANK = 1.2
# A rank's step is a pause if it takes this times the rank's median step: garbage collection, a
# file system, or the first step, which warms up. Chosen by hand.
PAUSE = 1.5
# A stage is named if its weight moves by this, against the stage in the middle. Chosen by hand.
SLOW_STAGE = 1.3
# Slow steps of a window after which a rank is named; one alone may be a pause.
_NAMED_AFTER = 2


@dataclass(frozen=True)
class Verdict:
    """What a window of steps shows."""

    left_out: npt.NDArray[np.bool_]
    """[dp, pp, steps]: steps whose seconds do not count."""
    messages: tuple[str, ...]
    """What began or ended, a sentence each."""


class SlowRanks:
    """Finds slow ranks, window by window; deterministic.

    Attributes:
        slow: (DP rank, stage) of the ranks that are slow now, in order.
    """

    def __init__(self) -> None:
        self.slow: tuple[tuple[int, int], ...] = ()

    def judge(self, ratios: Floats) -> Verdict:
        """Judge a window.

        Args:
            ratios: float64 [dp, pp, steps], measured over predicted seconds of each rank; 0 where
                a rank measured nothing.
        """
        known = ratios > 0
        logs = np.log(np.where(known, ratios, 1.0))
        of_stage = _lower_median(logs, known, axis=0)
        of_rank = _lower_median(logs, known, axis=2)
        lags = logs - of_stage
        is_slow = known & (lags > np.log(SLOW_RANK))
        is_pause = known & (logs - of_rank > np.log(PAUSE))
        messages = []
        now = []
        num_steps = ratios.shape[2]
        for rank, stage in np.ndindex(ratios.shape[:2]):
            count = int(is_slow[rank, stage].sum())
            was = (rank, stage) in self.slow
            name = f"DP rank {rank} of stage {stage}"
            if count >= min(_NAMED_AFTER, num_steps) or (was and count):
                now.append((rank, stage))
                if not was:
                    factor = float(np.exp(np.median(lags[rank, stage][is_slow[rank, stage]])))
                    messages.append(
                        f"{name} took {factor:.2f} times as long as the stage's other ranks in "
                        f"{count} of {num_steps} steps; its seconds do not count until it is as "
                        "fast as they are"
                    )
            elif was:
                messages.append(f"{name} is as fast as the stage's other ranks again")
        self.slow = tuple(now)
        return Verdict(is_slow | is_pause, tuple(messages))


class MovedStages:
    """Finds pipeline stages that take longer, or less long, than the model had it.

    Args:
        layout: the layout of the run.
        start: the model that the run begins with.

    Attributes:
        weights: float64 [pp], mean weight of each stage's chunks when a stage was last named.
    """

    def __init__(self, layout: Layout, start: CostModel) -> None:
        self._layout = layout
        self.weights = self._stage_weights(start)

    def judge(self, model: CostModel) -> list[str]:
        """A sentence for each stage whose weight in a newly fitted model differs.

        Stages are compared with the one in the middle, of two with the one that became faster:
        scaling all of them moves none.
        """
        before = self.weights
        after = self._stage_weights(model)
        moved = np.divide(after, before, out=np.ones_like(after), where=before > 0)
        moved /= np.sort(moved)[(self._layout.pp - 1) // 2]
        messages = [
            f"stage {stage} takes {factor:.2f} times as long as the cost model had it against the "
            f"other stages; its weight went from {before[stage]:.2f} to {after[stage]:.2f}"
            for stage, factor in enumerate(moved.tolist())
            if not 1 / SLOW_STAGE < factor < SLOW_STAGE
        ]
        if messages:
            self.weights = after
        return messages

    def _stage_weights(self, model: CostModel) -> Floats:
        layout = self._layout
        # Chunks in model order: stage 1 of pp=2, vpp=2 has chunks 1 and 3.
        chunks = np.array(model.weights_for(layout)).reshape(layout.vpp, layout.pp)
        weights: Floats = chunks.mean(axis=0)
        return weights


def _lower_median(logs: Floats, known: npt.NDArray[np.bool_], axis: int) -> Floats:
    """The median along an axis, of an even number the lower one, with the axis kept.

    Of two ranks the faster one is the measure: a GPU does not run faster than it can.
    """
    ordered = np.sort(np.where(known, logs, np.inf), axis=axis)
    middle = np.maximum(known.sum(axis=axis, keepdims=True) - 1, 0) // 2
    found = np.take_along_axis(ordered, middle, axis=axis)
    return np.where(np.isfinite(found), found, 0.0)
