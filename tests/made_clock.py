"""A clock that takes the seconds of rows from a cost model, so that the right fit is known."""

from __future__ import annotations

import numpy as np

from megapack import CostModel, Layout
from megapack.cost.fit import Measurement
from megapack.cost.online import ChunkSeconds
from megapack.plan.plan import MicroBatch, StepPlan


class MadeClock:
    """Seconds of planned rows by a true cost model.

    Args:
        layout: the layout of the plans.
        true: gives the seconds.
        noise: standard deviation of the logarithm of each number of seconds.
    """

    def __init__(self, layout: Layout, true: CostModel, noise: float = 0.0) -> None:
        self.layout = layout
        self.true = true
        self.noise = noise
        self.slow: dict[tuple[int, int], float] = {}
        """What the seconds of a (DP rank, stage) are multiplied by."""
        self._rng = np.random.default_rng(0)

    def seconds(self, mb: MicroBatch, chunk: int, rank: int) -> ChunkSeconds:
        """What a chunk takes for a micro-batch on a DP rank."""
        layout = self.layout
        true = self.true
        factor = true.weights_for(layout)[chunk] * self.slow.get((rank, chunk % layout.pp), 1.0)
        sizes = {"row_tokens": mb.row_tokens, "num_samples": len(mb.samples), "width": mb.width}
        forward = factor * true.forward_seconds(layout, tokens_sq=mb.tokens_sq, **sizes)
        weights = factor * true.weight_seconds(layout, **sizes)
        noise = np.exp(self.noise * self._rng.standard_normal(3)) if self.noise else np.ones(3)
        forward_s, backward_s, weight_s = (
            noise * np.array([forward, forward * true.backward_ratio, weights])
        ).tolist()
        measured = Measurement(
            mb.row_tokens, mb.tokens_sq, len(mb.samples), forward_s, backward_s, mb.width, weight_s
        )
        return ChunkSeconds(chunk, measured)

    def step(self, step: StepPlan) -> dict[tuple[int, int], list[ChunkSeconds]]:
        """The rows of a step by (DP rank, stage)."""
        found: dict[tuple[int, int], list[ChunkSeconds]] = {}
        for rank, row in enumerate(step.ranks):
            for mb in row:
                for chunk in range(self.layout.num_chunks):
                    measured = self.seconds(mb, chunk, rank)
                    found.setdefault((rank, chunk % self.layout.pp), []).append(measured)
        return found
