"""Which GPU encodes which image of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megapack.base.arrays import Floats
from megapack.cost.model import EVEN_PATCHES, CostModel
from megapack.images import Images
from megapack.layout import Layout
from megapack.plan.images import used_images
from megapack.plan.plan import StepPlan


def with_images(
    step: StepPlan, images: Sequence[Images], layout: Layout, cost: CostModel, where: str
) -> StepPlan:
    """The step with the images of its samples, each on the GPU that encodes it.

    Args:
        images: of all samples of the input.
        where: `Policy.images`.
    """
    found = used_images(images, step.kept_samples)
    step = replace(step, images=tuple(found))
    if where == "row" or not found:
        return step
    per_rank = layout.world_size // layout.dp
    users: list[list[int]] = [[] for _ in found]
    for rank, own in enumerate(step.rank_images):
        for number in own:
            users[number] += range(rank * per_rank, (rank + 1) * per_rank)
    patches = np.array([image.patches for image in found])
    seconds = cost.image_seconds(patches)
    if not seconds.any():
        seconds = patches * (1 + patches / EVEN_PATCHES)
    owners = spread(seconds, layout.world_size, users)
    owned = zip(found, owners, strict=True)
    return replace(step, images=tuple(image._replace(owner=owner) for image, owner in owned))


def spread(seconds: Floats, num_gpus: int, users: Sequence[Sequence[int]]) -> list[int]:
    """A GPU for each image, so that all have about as much to do: the longest first (Graham 1969).

    Args:
        seconds: float64 [images].
        users: GPUs that read each image; of GPUs with equally little to do, one of these encodes
            it, which sends less.

    >>> spread(np.array([4.0, 64, 16, 16, 32]), 2, [[]] * 5)
    [0, 0, 1, 1, 1]
    >>> spread(np.array([16.0, 16]), 2, users=[[1], [0]])
    [1, 0]
    """
    loads = np.zeros(num_gpus)
    owners = [0] * seconds.size
    for i in np.argsort(-seconds, kind="stable").tolist():
        least = loads.min()
        own = (gpu for gpu in users[i] if loads[gpu] == least)
        owners[i] = next(own, int(loads.argmin()))
        loads[owners[i]] += seconds[i]
    return owners
