"""Work of images that a host's model encodes in the rows of their samples, on its first chunk.

Hosts have grids: int [images, 3] of frames, rows and columns of patches. The forward of an image of
n patches takes a n + b n^2 FLOPs, which count as tokens of the decoder here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from megapack.base.arrays import Floats

Patches = list[list[int]]
"""Of each image of each sample."""

TOWER_FLOPS = (9.0e8, 1.24e5)
"""a and b of a tower of 27 x 1152, which Qwen3-VL from 8B on, Qwen3.5 and Kimi K2.5 have; other
towers are up to twice as heavy."""
DECODER_FLOPS = 12.9e9
"""Forward of a token in a 7B decoder, which verl and ROLL assume, too."""

_GRIDS = ("image_grid_thw", "video_grid_thw", "grid_thws")


def patches_of(samples: Iterable[Any]) -> Patches | None:
    """The patches of each sample's images, a video's frames among them; None if there are none.

    Args:
        samples: of each sample what a processor made of its images; None or {} without any.

    >>> patches_of([{"image_grid_thw": [[1, 4, 6], [1, 2, 2]]}, None])
    [[24, 4], []]
    """
    found = [[n for name in _GRIDS for n in _frames((one or {}).get(name))] for one in samples]
    return found if any(found) else None


def _frames(grids: Any) -> list[int]:
    # A copy from the device, if they are there.
    rows = grids.tolist() if hasattr(grids, "tolist") else grids or []
    numbers = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return [high * wide for frames, high, wide in numbers.tolist() for _ in range(frames)]


def image_tokens(
    patches: Patches | None,
    num_samples: int,
    flops_per_token: float = DECODER_FLOPS,
) -> Floats:
    """float64 [samples]: as many tokens as each sample's images cost."""
    per_patch, per_patch_sq = TOWER_FLOPS
    flops = [sum(per_patch * n + per_patch_sq * n * n for n in one) for one in patches or ()]
    return np.array(flops or np.zeros(num_samples)) / flops_per_token
