"""Samples with images: in prompts and in responses, several in one, the same one in several."""

from __future__ import annotations

import torch
from torch import Tensor

from megapack.images import ImageRef, is_image_token
from megapack.samples import SampleBatch

IMAGE, START, END = 261, 259, 260
"""Ids of the toys of `job.data.toy_images`."""
_PATCH_NUMBERS = 3 * 2 * 4 * 4


class Sample:
    """Token ids, the images among them, and which tokens count."""

    def __init__(self, ids: list[int], refs: list[ImageRef], prompt_tokens: int) -> None:
        self.ids = torch.tensor(ids)
        self.refs = refs
        self.mask = ~torch.from_numpy(is_image_token(tuple(refs), len(ids)))
        self.mask[:prompt_tokens] = False


class _Maker:
    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(7)
        self._pixels: dict[str, Tensor] = {}

    def text(self, count: int) -> list[int]:
        return torch.randint(0, 250, (count,), generator=self._generator).tolist()

    def image(self, rows: int, columns: int) -> ImageRef:
        key = f"image {len(self._pixels)}"
        numbers = (rows * columns, _PATCH_NUMBERS)
        self._pixels[key] = torch.randn(numbers, generator=self._generator)
        return ImageRef(
            offset=0, grid=(1, rows, columns), key=key, pixels=lambda: self._pixels[key]
        )


def _sample(parts: list[list[int] | ImageRef], response_from: int) -> Sample:
    ids: list[int] = []
    refs: list[ImageRef] = []
    prompt_tokens = 0
    for index, part in enumerate(parts):
        if index == response_from:
            prompt_tokens = len(ids)
        if isinstance(part, ImageRef):
            ids.append(START)
            refs.append(ImageRef(offset=len(ids), grid=part.grid, key=part.key, pixels=part.pixels))
            ids += [IMAGE] * part.tokens + [END]
        else:
            ids += part
    return Sample(ids, refs, prompt_tokens)


CHOSEN = {"all": range(13), "few": (0, 1, 3)}
"""Numbers of samples; of the few one has an image, so that a rank has none."""


def make_samples(chosen: str = "all") -> list[Sample]:
    """Thirteen samples of ten images, or some of them; the fourth and the first have none."""
    maker = _Maker()
    text, image = maker.text, maker.image
    samples = [
        _sample([text(5), text(7)], 1),
        _sample([text(3), image(4, 4), text(4), text(6)], 3),
        _sample([text(2), image(4, 8), text(3), image(8, 4), image(4, 4), text(2), text(9)], 6),
        _sample([text(4), text(20)], 1),
    ]
    # A prompt group with an image; the same tokens with another image of the same size.
    before, after = text(6), text(5)
    seen, other = image(6, 8), image(6, 8)
    samples += [_sample([before, seen, after, text(count)], 3) for count in (5, 11, 3, 8)]
    samples += [_sample([before, other, after, text(7)], 3)]
    samples += [_sample([text(1), image(8, 12), text(2), text(12)], 3)]
    # A tool gives an image in the middle of a response.
    samples += [_sample([text(4), text(5), image(4, 6), text(6)], 1)]
    # A prompt with two images, and two answers.
    first, second, third = text(2), text(2), text(1)
    one, two = image(4, 4), image(8, 8)
    samples += [_sample([first, one, second, two, third, text(n)], 5) for n in (10, 6)]
    return [samples[i] for i in CHOSEN[chosen]]


def make_batch(samples: list[Sample]) -> SampleBatch:
    """The samples as a batch."""
    return SampleBatch(
        [sample.ids for sample in samples],
        {"response_mask": [sample.mask for sample in samples]},
        images=[sample.refs for sample in samples],
    )
