"""A host's row and its shared row lead to each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack import Layout
from megapack.prefixes import find_host_row

pytestmark = pytest.mark.unit


def ids_of(*samples: list[int]) -> tuple[np.ndarray, list[int]]:
    return np.array([i for sample in samples for i in sample]), [len(s) for s in samples]


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=3),
    answers=st.lists(st.integers(1, 9), min_size=2, max_size=8),
    cp=st.sampled_from([1, 2]),
)
def test_a_position_and_its_shared_one_have_the_same_tokens_before_them(
    prompts: list[list[int]], answers: list[int], cp: int
) -> None:
    layout = Layout(cp=cp)
    samples = []
    for k, tokens in enumerate(answers):
        sample = prompts[k % len(prompts)] + [3 + k] * tokens
        samples.append(sample + [0] * (-len(sample) % layout.sample_alignment))
    ids, spans = ids_of(*samples)
    row = find_host_row(ids, spans, layout)
    if row is None:
        return
    assert row.tokens < row.host_tokens == ids.size
    assert row.tokens % layout.row_alignment == 0
    assert not any(span % layout.sample_alignment for span in row.spans[: len(row.branches)])
    # The shared row has the token of each position, and its branch the position in the sample.
    assert (ids[row.to_host][row.to_shared] == ids).all()
    offsets = np.concatenate([np.arange(span) for span in spans])
    own = np.concatenate([np.arange(b.offset, b.offset + b.tokens) for b in row.branches])
    assert (own[row.to_shared] == offsets).all()
    # Each sample is the branches from the root on.
    starts = np.cumsum([0, *spans])
    for k in range(len(samples)):
        path = [b for b in row.branches if k in b.samples]
        positions = np.concatenate([np.arange(b.start, b.start + b.tokens) for b in path])
        assert (row.to_shared[starts[k] : starts[k + 1]] == positions).all()


def test_turns_that_begin_with_each_other_are_one_sequence() -> None:
    first, second = [5, 6, 7], [5, 6, 7, 8, 9]
    row = find_host_row(*ids_of(second, first, [5, 6, 1], [5, 6, 7, 8, 9, 2]), Layout())
    assert row is not None
    # The last sample has all of the first two; the third one parts after its first token.
    assert row.spans == (1, 2, 5)
    assert row.to_shared.tolist() == [0, 3, 4, 5, 6, 0, 3, 4, 0, 1, 2, 0, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "samples",
    [
        ([5, 6, 7, 8],),
        ([5, 6, 7, 8], [6, 6, 7, 8]),
        # Two tokens in common, of which one is shared, before answers of 1,000.
        ([5, 6, *[1] * 1000], [5, 6, *[2] * 1000]),
    ],
)
def test_rows_that_save_too_little_stay_as_they_are(samples: tuple[list[int], ...]) -> None:
    ids, spans = ids_of(*samples)
    assert find_host_row(ids, spans, Layout()) is None


def test_padding_behind_the_branches_belongs_to_no_sample() -> None:
    ids, spans = ids_of([5, 6, 7, 8, 9], [5, 6, 7, 8, 1], [5, 6, 7, 8, 2])
    row = find_host_row(ids, spans, Layout(tp=4, sequence_parallel=True))
    assert row is not None
    assert row.spans == (3, 2, 2, 2, 3)
    assert row.to_host[-3:].tolist() == [0, 0, 0]
    assert row.to_shared.max() == 8
