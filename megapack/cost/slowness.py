"""Tells a rank that is slow for a while from a model that is wrong.

    seconds over the fitted model's, of each rank and step -> steps to leave out, sentences

All DP ranks of a pipeline stage run the same layers, so the model cannot tell them apart: one that
takes longer than the others has a slow GPU or a slow network. A model that is wrong is wrong for
all of them. A stage that takes longer on all of its DP ranks has more work than the model thinks,
and its weight follows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megapack.base.arrays import Floats

# A rank's step is slow if it takes this times the seconds of the stage's other DP ranks. With 5 %
# noise in each of 16 rows the steps of two ranks differ by less than 3 %; an H200 that throttles
# loses 10 to 40 %. Chosen by hand.
SLOW_RANK = 1.2
# A rank's step is a pause if it takes this times the rank's median step: garbage collection, a
# file system, or the first step, which warms up. Chosen by hand.
PAUSE = 1.5
# Slow steps between two fits after which a rank is named; one alone may be a pause.
_NAMED_AFTER = 2


class SlowRanks:
    """Finds slow ranks; deterministic.

    Attributes:
        slow: (DP rank, stage) of the ranks that are slow now.
    """

    def __init__(self) -> None:
        self.slow: set[tuple[int, int]] = set()

    def judge(self, ratios: Floats) -> tuple[npt.NDArray[np.bool_], list[str]]:
        """Judge the steps since the last fit.

        Args:
            ratios: float64 [dp, pp, steps], measured over predicted seconds of each rank; 0 where
                a rank measured nothing.

        Returns:
            Which steps' seconds do not count, [dp, pp, steps]; and what began or ended, a sentence
            each.
        """
        known = ratios > 0
        logs = np.log(np.where(known, ratios, 1.0))
        lags = logs - _lower_median(logs, known, axis=0)
        is_slow = known & (lags > np.log(SLOW_RANK))
        is_pause = known & (logs - _lower_median(logs, known, axis=2) > np.log(PAUSE))
        messages = []
        num_steps = ratios.shape[2]
        for rank, stage in np.ndindex(ratios.shape[:2]):
            name = f"DP rank {rank} of stage {stage}"
            steps = is_slow[rank, stage]
            count = int(steps.sum())
            was_slow = (rank, stage) in self.slow
            if not was_slow and count >= min(_NAMED_AFTER, num_steps):
                self.slow.add((rank, stage))
                factor = float(np.exp(np.median(lags[rank, stage][steps])))
                messages.append(
                    f"{name} took {factor:.2f} times as long as the stage's other ranks in "
                    f"{count} of {num_steps} steps; its seconds do not count until it is as fast "
                    "as they are"
                )
            elif was_slow and not count:
                self.slow.remove((rank, stage))
                messages.append(f"{name} is as fast as the stage's other ranks again")
        return is_slow | is_pause, messages


def _lower_median(logs: Floats, known: npt.NDArray[np.bool_], axis: int) -> Floats:
    """The median along an axis, of an even number the lower one, with the axis kept.

    Of two ranks the faster one is the measure: a GPU does not run faster than it can.
    """
    ordered = np.sort(np.where(known, logs, np.inf), axis=axis)
    middle = np.maximum(known.sum(axis=axis, keepdims=True) - 1, 0) // 2
    found = np.take_along_axis(ordered, middle, axis=axis)
    return np.where(np.isfinite(found), found, 0.0)
