"""Prefixes that do not pay are left out: the compiled loop against a slow recursion."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest

from megapack import Layout, SharedPrefixes
from megapack.base.arrays import Ints
from megapack.prefixes import PrefixTable, worthwhile

pytestmark = pytest.mark.unit


def slow_depths(shared: list[int], aligned: list[int], start: int = 0) -> list[int]:
    """Positions that each sample keeps in common with the one before it; the first one has none.

    Args:
        shared: what each sample but the first shares with the one before it.
        start: where the branch above these samples ends.
    """
    if not shared:
        return []
    end = min(shared)
    saved = len(shared) * (end - start)
    below = sum(aligned) - len(aligned) * end
    kept = end if 32 * saved >= below else start
    out: list[int] = []
    first = 0
    for k in [*(k for k, value in enumerate(shared) if value == end), len(shared)]:
        out += slow_depths(shared[first:k], aligned[first : k + 1], kept)
        if k < len(shared):
            out.append(kept)
        first = k + 1
    return out


def random_forest(random: Random, num_samples: int) -> tuple[SharedPrefixes, Ints]:
    """A forest of samples of 1 to 400 tokens, with few and with many common tokens."""
    most = random.choice([3, 30, 400])
    lengths = [random.randint(1, 400) for _ in range(num_samples)]
    common = [0] * num_samples
    for k in range(1, num_samples):
        common[k] = random.randint(0, min(most, lengths[k], lengths[k - 1]))
        if random.random() < 0.3:
            common[k] = min(common[k - 1], lengths[k])
    order = list(range(num_samples))
    random.shuffle(order)
    by_sample = np.empty(num_samples, dtype=np.int64)
    by_sample[order] = lengths
    return SharedPrefixes(tuple(order), tuple(common)), by_sample


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2), Layout(fp8=True)])
def test_branches_are_kept_as_a_slow_recursion_keeps_them(layout: Layout) -> None:
    random = Random(0)
    num_kept = 0
    for _ in range(300):
        prefixes, lengths = random_forest(random, random.randint(1, 30))
        prefixes.check(lengths)
        aligned = layout.aligned_sample_tokens(lengths)
        order = list(prefixes.order)
        before = PrefixTable(prefixes, lengths, layout)
        expected = {}
        starts = [*np.flatnonzero(before.shared == 0).tolist(), len(order)]
        for first, end in itertools.pairwise(starts):
            tree = order[first:end]
            depths = slow_depths(before.shared[first + 1 : end].tolist(), aligned[tree].tolist())
            expected |= dict(zip(tree, [0, *depths], strict=True))
        for k, (i, j) in enumerate(itertools.pairwise(order)):
            if 1 < prefixes.common[k + 1] == lengths[i]:  # All of it is in the next one.
                expected[j] = int(before.shared[k + 1])
        kept = worthwhile(prefixes, lengths, layout)
        kept.check(lengths)
        table = PrefixTable(kept, lengths, layout)
        found = dict.fromkeys(order, 0) | dict(zip(kept.order, table.shared.tolist(), strict=True))
        assert found == expected
        num_kept += sum(value > 0 for value in found.values())
    assert num_kept > 500


def test_a_chat_template_is_left_out_and_prompts_below_it_stay() -> None:
    # 8 samples of 1,000 tokens: all begin with 21, and two groups of four with 200.
    prefixes = SharedPrefixes(tuple(range(8)), (0, 200, 200, 200, 21, 200, 200, 200))
    kept = worthwhile(prefixes, np.full(8, 1000), Layout())
    assert kept.common == (0, 200, 200, 200, 0, 200, 200, 200)
    # 36 positions of all eight pay for themselves.
    prefixes = SharedPrefixes(prefixes.order, (0, 200, 200, 200, 37, 200, 200, 200))
    assert worthwhile(prefixes, np.full(8, 1000), Layout()) == prefixes


def test_a_chain_of_a_hundred_thousand_turns_needs_no_recursion() -> None:
    size = 100_000
    lengths = np.arange(1, size + 1) * 10
    prefixes = SharedPrefixes(tuple(range(size)), tuple((np.arange(size) * 10).tolist()))
    kept = worthwhile(prefixes, lengths, Layout())
    assert kept.common[-1] == 10 * (size - 1)
