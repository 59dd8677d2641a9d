"""Common beginnings of samples, found in token ids."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megapack.errors import ConfigError, DataError
from megapack.prefixes import SharedPrefixes
from megapack.prefixes.shared import _PIECE

pytestmark = pytest.mark.unit


def in_common(first: list[int], second: list[int]) -> int:
    """Equal tokens at the beginnings of two samples, counted one by one."""
    pairs = zip(first, second, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def between(prefixes: SharedPrefixes, first: int, second: int) -> int:
    """Tokens that two samples have in common by `prefixes`; at most own_tokens is 0."""
    if first not in prefixes.order or second not in prefixes.order:
        return 0
    places = sorted((prefixes.order.index(first), prefixes.order.index(second)))
    return min(prefixes.common[places[0] + 1 : places[1] + 1])


def random_tree(rng: random.Random) -> list[list[int]]:
    """Samples that continue each other at random places, around the edges of pieces."""
    samples: list[list[int]] = []
    for _ in range(rng.randrange(1, 10)):
        start = rng.choice(samples) if samples and rng.random() < 0.7 else []
        cut = rng.choice((0, 1, _PIECE - 1, _PIECE, _PIECE + 1, 2 * _PIECE, len(start)))
        tail = [rng.randrange(2) for _ in range(rng.choice((0, 1, 2, _PIECE - 1, _PIECE)))]
        samples.append((start[:cut] + tail) or [0])
    return samples


@pytest.mark.parametrize("seed", range(40))
def test_any_two_samples_have_their_common_beginning(seed: int) -> None:
    rng = random.Random(seed)
    samples = random_tree(rng)
    own_tokens = rng.choice((1, 2))
    prefixes = SharedPrefixes.from_samples(samples, mtp_num_layers=own_tokens - 1)
    assert prefixes.own_tokens == own_tokens
    prefixes.check(np.array([len(sample) for sample in samples]))
    for first, second in itertools.combinations(range(len(samples)), 2):
        common = in_common(samples[first], samples[second])
        assert between(prefixes, first, second) == (common if common > own_tokens else 0)


def test_no_samples_have_nothing_in_common() -> None:
    assert SharedPrefixes.from_samples([]) == SharedPrefixes((), ())


def test_dtypes_of_ids_make_no_difference() -> None:
    samples = [[70000, 5, 300, 1], [70000, 5, 300, 2], [9, 9]]
    expected = SharedPrefixes.from_samples(samples)
    assert expected.common == (0, 3)
    for dtype in (np.int32, np.int64, np.uint32, ">i8"):
        ids = [np.array(sample, dtype=dtype) for sample in samples]
        assert SharedPrefixes.from_samples(ids) == expected


def test_ids_beyond_a_vocabulary_are_refused() -> None:
    with pytest.raises(DataError, match="sample 1 has token ids from -3 to 5; give ids from 0"):
        SharedPrefixes.from_samples([[1], [-3, 5]])
    with pytest.raises(DataError, match="to 2147483648; give ids from 0 to 2147483647"):
        SharedPrefixes.from_samples([[1, 2**31]])


def test_samples_are_read_only_as_far_as_they_agree() -> None:
    num_samples = 2048
    length = 8000
    prompt = 1000
    group_size = 16
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 150_000, (num_samples // group_size, prompt), dtype=np.int32)
    first_answer = np.arange(num_samples, dtype=np.int32)
    read_tokens = 0

    def read(sample: int, first: int, last: int) -> npt.NDArray[np.int32]:
        nonlocal read_tokens
        read_tokens += last - first
        row = np.full(length, first_answer[sample], dtype=np.int32)
        row[:prompt] = prompts[sample // group_size]
        return row[first:last]

    prefixes = SharedPrefixes.from_reader(num_samples, read)
    assert len(prefixes.order) == num_samples
    assert set(prefixes.common) == {0, prompt}
    assert prefixes.common.count(0) == num_samples // group_size
    assert read_tokens / num_samples == -(-prompt // _PIECE) * _PIECE


@pytest.mark.parametrize("layers", [-1, "x", 1.0, True])
def test_a_number_of_layers_that_is_none_is_refused(layers: Any) -> None:
    with pytest.raises(ConfigError, match=r"mtp_num_layers=.*; set an integer of at least 0"):
        SharedPrefixes.from_samples([[1, 2], [1, 2]], mtp_num_layers=layers)
    with pytest.raises(ConfigError, match="set an integer of at least 0"):
        SharedPrefixes.from_groups([0, 0], [2, 2], mtp_num_layers=layers)
