"""megapack.hosts.skyrl through SkyRL's own signatures, on one rank.

Micro-batches of SkyRL's own iterator, its padding and the order of outputs: test_step_skyrl.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack import Layout
from megapack.hosts import skyrl
from tests.hosts.rollouts import first_fit_count

pytestmark = pytest.mark.hosts

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=30)


def planned(lengths: list[int], budget: int) -> SimpleNamespace:
    """What the constructor leaves in SkyRL's iterator; sequences are padded on the left."""
    iterator = SimpleNamespace()
    mask = (torch.arange(32) >= 32 - torch.tensor(lengths)[:, None]).long()
    skyrl.init_iterator(iterator, {"attention_mask": mask}, budget)
    return iterator


@settings(max_examples=30)
@given(lengths=LENGTHS, budget=st.integers(10, 60))
def test_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    found = planned(lengths, budget)
    rows = found._microbatches
    assert found._num_padding_microbatches == 0
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[i] for i in row) <= budget or len(row) == 1
    # First-fit-decreasing, 11/9 of the fewest and 6/9 more at most.
    assert len(rows) <= first_fit_count(sorted(lengths, reverse=True), budget)


def test_a_sample_over_the_budget_is_alone() -> None:
    assert sorted(planned([30, 5, 5], 12)._microbatches) == [[0], [1, 2]]


@settings(max_examples=30)
@given(lengths=LENGTHS, group=st.integers(2, 5))
def test_a_layout_makes_legal_counts(lengths: list[int], group: int) -> None:
    layout = Layout(pp=2, vpp=2, microbatch_group_size=group)
    skyrl.configure(layout=layout)
    found = planned(lengths, 30)
    rows, padding = found._microbatches, found._num_padding_microbatches
    assert layout.is_legal_count(len(rows) + padding)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    # Rows are split before padding is added.
    assert not padding or len(rows) == len(lengths)
