"""Images of samples: where they stand among the tokens, and what tells them apart.

An image is `grid` patches, which a model's tower turns into features; `merge` x `merge` patches
become one feature, which stands at one image token of the sample. An image of 4 x 6 patches that
begins at token 3 with merge=2 stands at tokens 3 to 8:

    5 6 7 I I I I I I 8        ImageRef(offset=3, grid=(1, 4, 6), key="a cat")

Positions of such samples have three numbers: of the frame, the row and the column (`positions`).
Pixels are asked for where an image is encoded, on one rank; grids and keys are known to all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megapack.base.arrays import Ints
from megapack.errors import DataError, brief

if TYPE_CHECKING:
    from torch import Tensor

# Numbers that stand for image tokens when samples are compared begin here: above all vocabularies,
# and below the 2^31 of `SharedPrefixes` with as many again.
_FIRST_NUMBER = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ImageRef:
    """One image of a sample; `pixels` gives [patches, numbers] on the rank that encodes it."""

    offset: int
    """Index of its first image token in the sample."""
    grid: tuple[int, int, int]
    """Frames, rows and columns of patches; an image has 1 frame."""
    key: str
    """Equal for equal pixels only: samples with images of one key share them, and each key is
    encoded once."""
    pixels: Callable[[], Tensor] | None = field(default=None, compare=False, repr=False)
    """Gives what the tower reads, [patches, numbers of a patch]; called on the rank that encodes
    the image, on a thread."""
    merge: int = 2
    """Patches of a token in each direction."""

    @property
    def patches(self) -> int:
        """Patches that the tower reads."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def tokens(self) -> int:
        """Image tokens in the sample, each with one feature."""
        return self.patches // self.merge**2

    @property
    def end(self) -> int:
        """Index of the token after it."""
        return self.offset + self.tokens

    def check(self, name: str, length: int) -> None:
        """Raise DataError, which begins with `name`, if it cannot stand in a sample."""
        numbers = (self.offset, self.merge, *self.grid) if isinstance(self.grid, tuple) else ()
        is_typed = isinstance(self.key, str) and all(
            isinstance(n, int | np.integer) for n in numbers
        )
        if not is_typed or len(numbers) != 5 or self.merge < 1:
            raise DataError(
                f"{name} is {brief(self)}; give offset and merge as integers, the grid as a tuple "
                "of three, and the key as text"
            )
        frames, rows, columns = self.grid
        if frames != 1 or min(rows, columns) < 1 or rows % self.merge or columns % self.merge:
            raise DataError(
                f"{name} has the grid {self.grid}; give 1 frame (videos are not trained) and rows "
                f"and columns that {self.merge} divides"
            )
        if self.offset < 0 or self.end > length:
            raise DataError(
                f"{name} stands at tokens {self.offset} to {self.end - 1} of {length}; give the "
                "index of its first image token"
            )
        if self.end == length:
            raise DataError(
                f"{name} ends with the last of {length} tokens; end the sample with a text token"
            )


Images = tuple[ImageRef, ...]
"""The images of one sample, in order."""


def checked_images(images: Sequence[Any] | None, lengths: Sequence[int]) -> list[Images]:
    """The images of each sample.

    Args:
        images: per sample its `ImageRef`s; None: no sample has one.
        lengths: tokens of each sample.

    Raises:
        DataError: another number of entries, values of other types, images that overlap or leave
            their sample, or one key with two grids.
    """
    if images is None:
        return [()] * len(lengths)
    if not isinstance(images, Sized) or len(images) != len(lengths):
        raise DataError(f"images are {brief(images)}; give a list per sample, {len(lengths)} lists")
    grids: dict[str, tuple[tuple[int, int, int], int]] = {}
    for sample, (refs, length) in enumerate(zip(images, lengths, strict=True)):
        if not isinstance(refs, Sequence):
            raise DataError(f"sample {sample}: images are {brief(refs)}; give a list of ImageRefs")
        end = 0
        for number, ref in enumerate(refs):
            name = f"sample {sample}: image {number}"
            if not isinstance(ref, ImageRef):
                raise DataError(f"{name} is {brief(ref)}; give an ImageRef")
            ref.check(name, length)
            if ref.offset < end:
                raise DataError(
                    f"{name} begins at token {ref.offset}, the one before it ends at "
                    f"{end}; give images in order"
                )
            end = ref.end
            own = ref.grid, ref.merge
            if grids.setdefault(ref.key, own) != own:
                grid, merge = grids[ref.key]
                raise DataError(
                    f"{name} has the grid {ref.grid} and merge={ref.merge}, another of the key "
                    f"{ref.key!r} {grid} and merge={merge}; give different images different keys"
                )
    return [tuple(refs) for refs in images]


def of_patches(patches: Sequence[int], name: str) -> Images:
    """Images of which only the patches are known, to plan with: one after the other from the
    sample's first token on, 4 patches a token. Images of one name are the same ones.

    >>> [(ref.offset, ref.grid, ref.key) for ref in of_patches([8, 16], "a")]
    [(0, (1, 2, 4), 'a image 0'), (2, (1, 2, 8), 'a image 1')]
    """
    found: list[ImageRef] = []
    for number, count in enumerate(patches):
        offset = found[-1].end if found else 0
        grid = (1, 2, 2 * max(1, count // 4))
        found.append(ImageRef(offset=offset, grid=grid, key=f"{name} image {number}"))
    return tuple(found)


def is_image_token(refs: Images, length: int) -> npt.NDArray[np.bool_]:
    """Per token of a sample: whether an image stands there."""
    found = np.zeros(length, dtype=np.bool_)
    for ref in refs:
        found[ref.offset : ref.end] = True
    return found


def positions(refs: Images, length: int) -> Ints:
    """The positions of a sample's tokens for a rotary embedding of frames, rows and columns.

    A text token has one position three times. An image's tokens have the position of its beginning
    plus (frame, row, column), and the text after it goes on after the largest of these.

    Returns:
        int64 [length, 3]. Of one token, an image of 4 x 6 patches and a token:

    >>> ref = ImageRef(offset=1, grid=(1, 4, 6), key="a cat")
    >>> positions((ref,), 8).tolist()  # doctest: +NORMALIZE_WHITESPACE
    [[0, 0, 0],
     [1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [1, 2, 3],
     [4, 4, 4]]
    """
    found = np.empty((length, 3), dtype=np.int64)
    at = following = 0
    for ref in refs:
        found[at : ref.offset] = np.arange(following, following + ref.offset - at)[:, None]
        following += ref.offset - at
        sizes = (ref.grid[0], ref.grid[1] // ref.merge, ref.grid[2] // ref.merge)
        found[ref.offset : ref.end] = np.indices(sizes).reshape(3, -1).T + following
        following += max(sizes)
        at = ref.end
    found[at:] = np.arange(following, following + length - at)[:, None]
    return found


class ImageNumbers:
    """Numbers in place of the token ids of images, by which samples are compared.

    Two prompts with other images have the same token ids. Each token of an image gets a number that
    only the same token of the same image has.
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._next = _FIRST_NUMBER

    def compared(self, ids: npt.NDArray[Any], refs: Images, begin: int = 0) -> npt.NDArray[Any]:
        """The ids with the numbers at image tokens.

        Args:
            ids: of a sample's tokens from `begin` on.

        >>> cat, dog = (ImageRef(offset=1, grid=(1, 2, 4), key=key) for key in ("cat", "dog"))
        >>> numbers, ids = ImageNumbers(), np.array([5, 9, 9, 6])
        >>> [(numbers.compared(ids, (ref,)) - 2**30).tolist()[1:3] for ref in (cat, dog, cat)]
        [[0, 1], [2, 3], [0, 1]]
        """
        if not refs:
            return ids
        found = ids.astype(np.int64)
        for ref in refs:
            first = self._first.setdefault(ref.key, self._next)
            self._next = max(self._next, first + ref.tokens)
            if self._next > 2 * _FIRST_NUMBER:
                raise DataError(f"a batch has over {_FIRST_NUMBER:,} image tokens; make it smaller")
            here = slice(max(0, ref.offset - begin), max(0, ref.end - begin))
            tokens = np.arange(ref.tokens)[max(0, begin - ref.offset) :]
            found[here] = (first + tokens)[: len(found[here])]
        return found


def images_digest(images: Sequence[Images]) -> str:
    """A digest of where images stand and of their keys, which all ranks must have alike."""
    places = [[(ref.offset, ref.grid, ref.key) for ref in refs] for refs in images]
    return hashlib.sha256(repr(places).encode()).hexdigest() if any(places) else ""
