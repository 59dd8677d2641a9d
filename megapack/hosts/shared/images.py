"""Images that a host's model encodes in the rows of their samples, on its first chunk.

Hosts have grids: int [images, 3] of frames, rows and columns of patches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import CostModel, cost_in_tokens
from megapack.images import of_patches
from megapack.layout import Layout
from megapack.policy import Policy

Patches = list[list[int]]
"""Of each image of each sample."""

DECODER_FLOPS = 14e9
"""Forward of a token, in which `cost_in_tokens` counts patches: a 7B decoder."""
GRIDS = ("image_grid_thw", "video_grid_thw", "grid_thws")


def patches_of(samples: Iterable[Any]) -> Patches | None:
    """The patches of each sample's images, a video's frames among them; None if there are none.

    Args:
        samples: of each sample what a processor made of its images; None or {} without any.

    >>> patches_of([{"image_grid_thw": [[1, 4, 6], [1, 2, 2]]}, None])
    [[24, 4], []]
    """
    found = [[n for name in GRIDS for n in _frames((one or {}).get(name))] for one in samples]
    return found if any(found) else None


def _frames(grids: Any) -> list[int]:
    # A copy from the device, if they are there.
    rows = grids.tolist() if hasattr(grids, "tolist") else grids or []
    numbers = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return [high * wide for frames, high, wide in numbers.tolist() for _ in range(frames)]


def image_tokens(patches: Patches | None, num_samples: int) -> Floats:
    """float64 [samples]: as many tokens of a 7B decoder as each sample's images cost."""
    cost = cost_in_tokens(Layout())
    return np.array([cost.image_seconds(one).sum() for one in patches or [[]] * num_samples])


def with_images(
    patches: Patches | None,
    lengths: Sequence[int] | Ints,
    *,
    layout: Layout,
    cost: CostModel | None,
    policy: Policy,
    scale: float | None = None,
) -> dict[str, Any]:
    """Arguments of `build_dp_schedule` for samples with these images.

    Images of samples that are shorter than their image tokens do not count: such lengths are those
    before the host puts the tokens in.

    Args:
        scale: the tower's seconds over those that `cost_in_tokens` has. None: those of a cost model
            that was measured with images, or of a tower that tensor-parallel ranks split.
    """
    plain = {"layout": layout, "cost": cost, "policy": policy}
    refs = [of_patches(one, str(sample)) for sample, one in enumerate(patches or ())]
    if not refs or any(one and one[-1].end >= n for one, n in zip(refs, lengths, strict=True)):
        return plain
    if cost is None or not cost.per_patch or scale is not None:
        assumed = cost_in_tokens(layout)
        cost = cost or assumed
        factor = cost.per_token * (1 / layout.tp if scale is None else scale)
        rates = {name: factor * getattr(assumed, name) for name in ("per_patch", "per_patch_sq")}
        cost = dataclasses.replace(cost, **rates)
    policy = dataclasses.replace(policy, images="row")
    return {"layout": layout, "cost": cost, "policy": policy, "images": refs}
