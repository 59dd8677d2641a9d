"""Traces of images: the same each time, as their sources say, and in the form the package takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megapack.images import checked_images
from tools.benching.image_traces import TRACES, Sample, Text, grid, images, lengths, trace
from tools.image_traces import table

pytest.importorskip("transformers")
pytest.importorskip("PIL")

pytestmark = pytest.mark.unit

PROMPTS = 2000


def patches_of(name: str) -> np.ndarray:
    """Of each image of a trace."""
    return np.array([ref.patches for own in images(trace(name, PROMPTS, 1)) for ref in own])


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_the_same_each_time_and_with_any_group(name: str) -> None:
    samples = trace(name, 6, 4)
    assert trace(name, 6, 4) == samples
    assert trace(name, 4, 4) == samples[:16]
    prompts = [(sample.grids, sample.text_tokens) for sample in samples[::4]]
    assert [(sample.grids, sample.text_tokens) for sample in trace(name, 6, 1)] == prompts


@pytest.mark.parametrize("name", TRACES)
def test_a_group_shares_its_images_alone(name: str) -> None:
    samples = trace(name, 50, 8)
    for k in range(50):
        group = samples[8 * k : 8 * k + 8]
        assert len({(sample.keys, sample.grids, sample.text_tokens) for sample in group}) == 1
        assert len({sample.response_tokens for sample in group}) > 1
    keys = [key for sample in samples for key in sample.keys]
    assert len(set(keys)) == 50 * len(samples[0].keys) == len(keys) / 8


@pytest.mark.parametrize("name", TRACES)
def test_the_package_takes_a_trace(name: str) -> None:
    samples = trace(name, 50, 2)
    checked = checked_images(images(samples), lengths(samples))
    for sample, refs, length in zip(samples, checked, lengths(samples), strict=True):
        assert all(rows % 2 == columns % 2 == 0 for rows, columns in sample.grids)
        assert 4 * sample.image_tokens == sum(rows * columns for rows, columns in sample.grids)
        assert length == sample.text_tokens + sample.image_tokens + sample.response_tokens
        # The question and the template's end are behind the images.
        assert refs[-1].end + 1 + 5 < length - sample.response_tokens


def test_images_stand_where_the_template_has_them() -> None:
    # Before: a role, and the begin of an image; between two: an end and a begin.
    sample = Sample(keys=("a", "b"), grids=((2, 4), (4, 4)), text_tokens=20, response_tokens=5)
    assert [(ref.offset, ref.end) for ref in sample.images] == [(4, 6), (8, 12)]
    assert (sample.image_tokens, sample.length) == (6, 31)


def test_grids_are_those_of_qwen3_vl() -> None:
    # To the nearest 32 pixels, with the shape kept at the limits of 256^2 and 4096^2 pixels.
    assert grid((640, 427)) == (26, 40)
    assert grid((100, 100)) == (16, 16)
    rows, columns = grid((6250, 9375))
    assert rows * columns <= 65536 < (rows + 2) * (columns + 2)
    assert rows / columns == pytest.approx(1.5, rel=0.02)


def test_sizes_are_as_their_sources_say() -> None:
    documents = patches_of("documents")
    # Four of five pages of 1,700 x 2,200 pixels, 62 % of all; infographics of the processor's most.
    near = np.abs(documents - 3.7e6 / 256) < 0.25 * 3.7e6 / 256
    assert 0.5 < near.mean() < 0.62
    assert 60_000 < documents.max() <= 65_536
    # 840 x 535 pixels on average.
    assert patches_of("charts").mean() == pytest.approx(840 * 535 / 256, rel=0.03)
    photos = patches_of("photos")
    # 354 images of COCO have 1,054 on average; 985 x 768 pixels of TextVQA.
    is_coco = photos < 2000
    assert photos[is_coco].mean() == pytest.approx(1054, rel=0.03)
    assert photos[~is_coco].mean() == pytest.approx(985 * 768 / 256, rel=0.03)
    assert is_coco.mean() == pytest.approx(0.5, abs=0.04)
    found, counts = np.unique(patches_of("generated"), return_counts=True)
    assert found.tolist() == [576, 1024, 4096]
    assert np.ptp(counts) < 0.2 * counts.mean()


def test_characters_have_the_mean_and_spread_that_are_given() -> None:
    text = Text(least=220, mean=254.82, spread=19.13, most=354)
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = np.array([text.draw(rng) for _ in range(20_000)])
    assert (drawn.mean(), drawn.std()) == pytest.approx((254.82, 19.13), rel=0.05)
    assert (drawn.min() >= 220, drawn.max()) == (True, 354)


@pytest.mark.parametrize(("name", "mean"), [("photos", 227), ("generated", 1069)])
def test_responses_have_a_long_tail(name: str, mean: float) -> None:
    drawn = np.array([sample.response_tokens for sample in trace(name, 1000, 8)])
    # The limit takes away from long ones.
    assert 0.9 * mean < drawn.mean() < 1.02 * mean
    assert drawn.max() == 4096
    below = drawn[drawn < 4096]
    assert np.percentile(below, 99) > 4 * np.median(below)


@pytest.mark.parametrize("page", ["measured/image_traces.md", "maintainers/images.md"])
def test_pages_have_these_numbers(page: str, repo_root: Path) -> None:
    text = (repo_root / "docs" / page).read_text(encoding="utf-8")
    for line in list(table())[2:]:
        assert line.removesuffix("|") in text
