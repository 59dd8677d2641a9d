"""Seconds of a step's images: ahead of the rows on all GPUs, or in them on the first chunk."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megapack.base.arrays import Floats
from megapack.cost.model import CostModel
from megapack.layout import Layout
from megapack.plan.order import StepOrder
from megapack.plan.plan import StepPlan


class Phases(NamedTuple):
    """Images ahead of the rows of a step. A GPU without images waits for the others."""

    encoding: Floats
    """float64 [dp, pp]: seconds of the slowest GPU of each stage."""
    exchange: float
    """Seconds until features have come to the DP rank that reads the most."""
    ratio: float
    """Seconds of the tower's backward over those of its forward; 0 without one."""

    @property
    def before(self) -> float:
        """Seconds until the first row can begin."""
        return float(self.encoding.max()) + self.exchange

    @property
    def after(self) -> float:
        """Seconds from the last row to the tower's gradients."""
        if not self.ratio:
            return 0.0
        return self.ratio * float(self.encoding.max()) + 2 * self.exchange

    def spans(self, rows_end: float) -> list[tuple[int, int, Any, float, float]]:
        """DP rank, stage, kind of event, start and end of what each stage does."""
        found: list[tuple[int, int, Any, float, float]] = []
        back = rows_end + 2 * self.exchange
        for (rank, stage), seconds in np.ndenumerate(self.encoding):
            found.append((rank, stage, "E", 0.0, float(seconds)))
            found.append((rank, stage, "T", back, back + self.ratio * float(seconds)))
        return [span for span in found if span[4] > span[3]]


def image_phases(step: StepPlan, layout: Layout, cost: CostModel, *, forward_only: bool) -> Phases:
    """What comes before and after the rows; nothing if rows encode the images, or there are none.

    The GPUs of a DP rank are counted stage after stage.
    """
    loads = np.zeros(layout.world_size)
    tokens = [0]
    if step.images and step.images[0].owner is not None:
        seconds = cost.image_seconds([image.patches for image in step.images])
        np.add.at(loads, [image.owner or 0 for image in step.images], seconds)
        tokens = [sum(step.images[i].tokens for i in own) for own in step.rank_images]
    encoding = loads.reshape(layout.dp, layout.pp, -1).max(axis=2)
    ratio = 0.0 if forward_only else cost.tower_ratio
    return Phases(encoding, cost.per_image_token * max(tokens), ratio)


def row_image_seconds(step: StepPlan, rank: int, cost: CostModel) -> Floats:
    """float64 [M]: the forward of the images that each row of a DP rank encodes."""
    if not step.images or step.images[0].owner is not None:
        return np.zeros(len(step.ranks[rank]))
    seconds = cost.image_seconds([image.patches for image in step.images])
    found = []
    for mb in step.ranks[rank]:
        images = step.images_in(mb)
        # A row that holds a prefix once encodes its images once.
        found.append(seconds[sorted(set(images)) if mb.shared_tokens else images].sum())
    return np.array(found)


def on_first_chunk(order: StepOrder, row_seconds: Floats, ratio: float) -> Floats:
    """float64 [operations]: what images add to the operations of a DP rank.

    Args:
        row_seconds: float64 [M], of forwards.
        ratio: see `CostModel.tower_ratio`.
    """
    passes = np.array([1.0, ratio, 0.0])[order.kind]
    return np.where(order.chunk == 0, passes * row_seconds[order.microbatch], 0.0)
