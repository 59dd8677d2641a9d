"""Four traces of images and text, to judge how images are spread over ranks. Nobody publishes one.

    trace("documents", num_prompts=32, group_size=8) -> 256 samples
    lengths(samples), images(samples)                -> what `megapack.images` takes

Sizes and lengths are drawn from statistics of public data sets; each number has its source beside
it, and "assumed" stands where there is none. docs/maintainers/images.md has them in one table.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megapack.images import ImageRef, Images
from megapack.job.data.images.reader import ImageReader

# Qwen/Qwen3-VL-*: preprocessor_config.json. The edges are numbers of pixels, 256^2 and 4096^2.
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}
# Tokens of Qwen3-VL's chat template: "<|im_start|>user\n" before the images, around each its begin
# and its end, and "<|im_end|>\n<|im_start|>assistant\n" before the response.
_BEFORE = 3
_AROUND = 1
_AFTER = 5
# Characters of a token of English text: assumed, as is usual.
_CHARACTERS = 4
# Sigma of the logarithm of response lengths: DORA (arXiv:2604.26256) finds p99 above 10 times the
# median for mathematics and code, so ln(10) / 2.33. That answers on images have the same tail, and
# that those to one prompt differ as much as those to many, is assumed.
_TAIL = 1.0
# Most tokens of a response: FAST (arXiv:2504.18458), appendix B.
_MOST_RESPONSE = 4096

Size = tuple[int, int]
"""Width and height of an image, in pixels."""


@dataclass(frozen=True)
class Sample:
    """A prompt with its images, and one response."""

    keys: tuple[str, ...]
    """Of its images; all samples of a prompt have the same images."""
    grids: tuple[tuple[int, int], ...]
    """Rows and columns of patches of each image."""
    text_tokens: int
    """Of the prompt, without its images."""
    response_tokens: int

    @property
    def image_tokens(self) -> int:
        """Tokens that stand for its images."""
        return sum(ref.tokens for ref in self.images)

    @property
    def length(self) -> int:
        """All of its tokens."""
        return self.text_tokens + self.image_tokens + self.response_tokens

    @property
    def images(self) -> Images:
        """Its images, which stand before the question."""
        refs = []
        end = _BEFORE
        for key, grid in zip(self.keys, self.grids, strict=True):
            refs.append(ImageRef(offset=end + _AROUND, grid=(1, *grid), key=key))
            end = refs[-1].end + _AROUND
        return tuple(refs)


@dataclass(frozen=True)
class Text:
    """Characters of prompts, as data sets' statistics have them."""

    least: int
    mean: float
    spread: float
    """Standard deviation."""
    most: int

    def draw(self, rng: np.random.Generator) -> float:
        """A prompt's: the least and a lognormal with what the mean has more."""
        more = self.mean - self.least
        sigma = math.sqrt(math.log1p((self.spread / more) ** 2))
        drawn = self.least + rng.lognormal(math.log(more) - sigma**2 / 2, sigma)
        return min(drawn, self.most)


Prompt = tuple[list[Size], float]
"""Sizes of a prompt's images, and its characters."""

# evalscope (github.com/modelscope/evalscope), benchmarks/_meta: docvqa, infovqa, chartqa and vqav2
# .json, with the instructions of its prompts.
_DOCVQA = Text(least=220, mean=254.82, spread=19.13, most=354)
_INFOVQA = Text(least=222, mean=273.38, spread=22.18, most=390)
_CHARTQA = Text(least=178, mean=224.33, spread=21.52, most=352)
_VQAV2 = Text(least=165, mean=185.83, spread=10.1, most=255)
# UniRL (github.com/Tencent-Hunyuan/UniRL): the 25,432 lines of datasets/pickscore/train.txt, with
# the 380 characters of instructions in its unified_reward.py.
_PICKSCORE = Text(least=397, mean=493.1, spread=114.8, most=2331)


def _documents(rng: np.random.Generator) -> Prompt:
    # By questions to train on: 39,463 of DocVQA (arXiv:2007.00398, 3.2) and 23,946 of
    # InfographicVQA (arXiv:2104.12756, 3.3).
    if rng.uniform() < 39463 / (39463 + 23946):
        # Known of pages: all are between 593 x 294 and 5367 x 7184 (evalscope); and from notes of
        # evaluations in public repositories, a weak source, 1666 x 2149, 1653 x 2339, 1692 x 2245,
        # 2103 x 1604, 1704 x 1105 and 1787 x 2286, and that 10 of 200 are below 1 megapixel. So 4
        # of 5 pages of 200 DPI, the others of any size: assumed, with the sigmas that fit these.
        median, sigma = (3.7e6, 0.1) if rng.uniform() < 0.8 else (2e6, 1.03)
        drawn = rng.lognormal(math.log(median), sigma)
        short = math.sqrt(np.clip(drawn, 593 * 294, 5367 * 7184) / 1.3)
        # Upright in 4 of 5: assumed.
        width, height = (short, 1.3 * short) if rng.uniform() < 0.8 else (1.3 * short, short)
        return [(round(width), round(height))], _DOCVQA.draw(rng)
    # Between 600 x 340 and 6250 x 9375 (evalscope, whose first ten sizes are all 1000 wide). Twice
    # as high as wide, and both sigmas: assumed.
    width = np.clip(rng.lognormal(math.log(1000), 0.4), 600, 6250)
    height = np.clip(width * rng.lognormal(math.log(2), 0.55), 340, 9375)
    return [(round(width), round(height))], _INFOVQA.draw(rng)


def _charts(rng: np.random.Generator) -> Prompt:
    # Of ChartQA: 840 x 535 on average (MME-RealWorld, arXiv:2408.13257, table 2), from 184 x 326 to
    # 800 x 1796 (evalscope). Lognormal with both sigmas: assumed; 2,500 charts then span that.
    sigma = 0.5
    drawn = rng.lognormal(math.log(840 * 535) - sigma**2 / 2, sigma)
    area = np.clip(drawn, 184 * 326, 800 * 1796)
    width = math.sqrt(area * rng.lognormal(math.log(840 / 535), 0.3))
    return [(round(width), round(area / width))], _CHARTQA.draw(rng)


# Of COCO, with their number among the 354 images of zzowenzz/COCO_Tiny, enginbozaba/tiny_coco and
# Obmutescence/COCO-MINI on GitHub, by grids; 40 of other sizes are left out.
_COCO = {
    (640, 427): 101,
    (640, 480): 87,
    (480, 640): 38,
    (500, 375): 20,
    (427, 640): 20,
    (640, 448): 13,
    (500, 333): 10,
    (375, 500): 10,
    (640, 384): 9,
    (640, 512): 6,
}
# Of TextVQA's OpenImages: shares with which they are 985 x 768 on average (MME-RealWorld, table 2);
# that the long side has 1024 pixels is assumed.
_OPEN_IMAGES = {
    (1024, 768): 0.56,
    (1024, 683): 0.31,
    (768, 1024): 0.09,
    (683, 1024): 0.04,
}


def _photos(rng: np.random.Generator) -> Prompt:
    # As many of each: assumed.
    shares = _COCO if rng.uniform() < 0.5 else _OPEN_IMAGES
    ends = np.cumsum(list(shares.values()))
    found = int(np.searchsorted(ends, rng.uniform(0, ends[-1]), side="right"))
    return [list(shares)[found]], _VQAV2.draw(rng)


# Of UniRL's recipes: for Qwen-Image; SD3, BAGEL and FLUX.2-klein; HunyuanImage-3. As many of each:
# assumed.
_SIDES = (384, 512, 1024)


def _generated(rng: np.random.Generator) -> Prompt:
    # Two images of one text are compared, as in HPD v2 (arXiv:2306.09341).
    side = _SIDES[rng.integers(len(_SIDES))]
    return [(side, side)] * 2, _PICKSCORE.draw(rng)


# What draws a prompt, and the mean of responses before they are cut. The means are published for
# other images, and carried over: assumed. Documents and charts: GRPO of Qwen2.5-VL on Geometry3K
# stays near 330 (FAST, 3.1, which trains on DocVQA and ChartQA too). Photos: GRPO of Qwen2.5-VL-3B
# on CLEVR ends at 227 (TON, arXiv:2505.16854, table 2). Generated: 1,069, of the 7B on GeoQA (the
# same).
TRACES = {
    "documents": (_documents, 330),
    "charts": (_charts, 330),
    "photos": (_photos, 227),
    "generated": (_generated, 1069),
}


@functools.cache
def _reader() -> ImageReader:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
        reader = ImageReader(Path(folder), image_token=0)
        # Reads the processor, while its folder is there.
        reader.grid(256, 256)
    return reader


def grid(size: Size) -> tuple[int, int]:
    """Rows and columns of Qwen3-VL's patches, with the limits that it is published with.

    >>> grid((1024, 768))
    (48, 64)
    """
    return _reader().grid(*size)


def trace(name: str, num_prompts: int, group_size: int) -> list[Sample]:
    """The samples of a trace, prompt by prompt; always the same.

    Args:
        name: one of `TRACES`.
        num_prompts: the first so many; each has images of its own.
        group_size: responses to each prompt, which share its images.
    """
    draw, mean = TRACES[name]
    # Two streams, so that prompts are the same with any group.
    seeds = [(list(TRACES).index(name), stream) for stream in range(2)]
    prompts, responses = (np.random.Generator(np.random.PCG64(seed)) for seed in seeds)
    samples = []
    for k in range(num_prompts):
        sizes, characters = draw(prompts)
        keys = tuple(f"{name} {k} {image}" for image in range(len(sizes)))
        text = _BEFORE + 2 * _AROUND * len(sizes) + _AFTER + math.ceil(characters / _CHARACTERS)
        drawn = responses.lognormal(math.log(mean) - _TAIL**2 / 2, _TAIL, group_size)
        grids = tuple(map(grid, sizes))
        for tokens in np.clip(drawn, 1, _MOST_RESPONSE).astype(int).tolist():
            samples.append(Sample(keys, grids, text, tokens))
    return samples


def lengths(samples: Sequence[Sample]) -> list[int]:
    """Tokens of each sample."""
    return [sample.length for sample in samples]


def images(samples: Sequence[Sample]) -> list[Images]:
    """The images of each sample, as `megapack.images.checked_images` takes them."""
    return [sample.images for sample in samples]
