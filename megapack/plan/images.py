"""The images of a planned step: which GPU encodes each, and which samples use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from megapack.images import Images


class PlannedImage(NamedTuple):
    """One different image of a step."""

    key: str
    """`ImageRef.key`."""
    patches: int
    tokens: int
    """Image tokens in each sample that uses it."""
    owner: int | None
    """The GPU that encodes it ahead of the schedule. The GPUs of DP rank r are counted from
    r * tp * pp * cp on, in the order of their ranks in the job. None under images="row": each row
    encodes the images of its samples."""
    samples: tuple[int, ...]
    """The samples that use it, ascending; one that has it twice stands there twice."""

    @classmethod
    def from_cell(cls, cell: Sequence[Any]) -> PlannedImage:
        """Read a list of a plan's JSON."""
        key, patches, tokens, owner, samples = cell
        return cls(key, patches, tokens, owner, tuple(samples))


def used_images(images: Sequence[Images], samples: Iterable[int]) -> list[PlannedImage]:
    """The different images of some samples, in the order in which they use them, without owners.

    Args:
        images: of all samples of the input.
        samples: ascending.
    """
    sizes: dict[str, tuple[int, int]] = {}
    users: dict[str, list[int]] = {}
    for sample in samples:
        for ref in images[sample]:
            # A grid may have numpy's integers, which JSON refuses.
            sizes.setdefault(ref.key, (int(ref.patches), int(ref.tokens)))
            users.setdefault(ref.key, []).append(sample)
    return [PlannedImage(key, *sizes[key], None, tuple(own)) for key, own in users.items()]
