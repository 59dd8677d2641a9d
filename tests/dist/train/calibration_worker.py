"""The main job with plan.calibrate=online, on a clock whose cost model is known.

    torchrun ... -m tests.dist.train.calibration_worker train CONFIG [section.key=value ...]

DP rank 1 of stage 0 takes 1.5 times as long as the model says.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from megapack import CostModel
from megapack.base.arrays import Floats
from megapack.cli import main
from megapack.cost.online import ChunkSeconds
from megapack.job.train import calibrator
from megapack.job.train.marks import Recorder
from megapack.plan.plan import StepPlan
from tests.made_clock import MadeClock

TRUE = CostModel(
    fixed=4e-3,
    per_token=2e-5,
    per_token_sq=1e-8,
    backward_ratio=1.7,
    stage_weights=(0.75, 1.25),
)
SLOW_RANK = (1, 0)


class Calibrator(calibrator.Calibrator):
    """Measures by the clock."""

    def _measured(self, recorder: Recorder, step: StepPlan) -> list[ChunkSeconds]:
        ran = super()._measured(recorder, step)
        layout = self.layout
        is_known = layout.num_chunks == len(TRUE.stage_weights or ())
        clock = MadeClock(layout, TRUE if is_known else replace(TRUE, stage_weights=None))
        clock.slow = {SLOW_RANK: 1.5}
        rank = self.adapter.dp_rank
        made = clock.step(step)[rank, self._stage]
        # Every forward and backward of this rank was marked, with its own sizes.
        assert sorted(each.row.sizes for each in ran) == sorted(each.row.sizes for each in made)
        assert {each.chunk for each in ran} == {each.chunk for each in made}
        return made

    def _summed(self, own: Floats) -> Floats:
        before = own.copy()
        total = super()._summed(own)
        # The rank keeps its own sums: with those of all ranks the past would count too often.
        assert (own == before).all()
        return total


if __name__ == "__main__":
    from megapack.job.train import job

    job.Calibrator = Calibrator  # type: ignore[misc]
    sys.exit(main())
