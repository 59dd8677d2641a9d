"""Invariant 13: the images of steps."""

from __future__ import annotations

import numpy as np

from megapack.plan.checks.reading import Reading, broken
from megapack.plan.images import used_images


def check_images(read: Reading) -> None:
    """Raise PlanError if a step's images are not those of its samples, or none encodes them."""
    plan = read.plan
    is_ahead = plan.policy.images == "ahead"
    most = plan.policy.max_patches_per_gpu
    for where, step in read.steps:
        for mb in step.microbatches if most is not None else ():
            patches = sum(step.images[n].patches for n in step.images_in(mb))
            if patches > (most or 0) and np.unique(read.set_of[list(mb.samples)]).size > 1:
                raise broken(
                    13, f"{where} has a row of {patches} patches, max_patches_per_gpu={most}"
                )
        kept = set(step.kept_samples)
        for image in step.images:
            name = f"{where}: image {image.key!r}"
            if not image.samples or not kept.issuperset(image.samples):
                raise broken(13, f"{name} is of the samples {image.samples}, not all of the step")
            owner = image.owner
            if (owner is not None) != is_ahead or not 0 <= (owner or 0) < plan.layout.world_size:
                raise broken(
                    13,
                    f"{name} is encoded by GPU {owner} of {plan.layout.world_size} under "
                    f"images={plan.policy.images!r}",
                )
        if read.images is None:
            if len({image.key for image in step.images}) < len(step.images):
                raise broken(13, f"{where} has an image twice")
            continue
        actual = used_images(read.images, step.kept_samples)
        planned = [image._replace(owner=None) for image in step.images]
        if planned != actual:
            raise broken(
                13,
                f"{where} has {len(planned)} images, its samples {len(actual)}, or others; plan "
                "with build_dp_schedule(images=...) of the same samples",
            )
