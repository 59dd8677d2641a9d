"""What each of the ranks that share a row gets of heads and of parameters."""

from __future__ import annotations

import pytest
import torch

from megapack.model.recurrent.heads import Section, sizes

pytestmark = pytest.mark.unit


def test_ranks_get_heads_of_their_own_or_copies_of_groups() -> None:
    values = torch.arange(6)
    heads = Section(heads=6, width=1)
    assert [heads.part(values, rank, 3, 0).tolist() for rank in range(3)] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    groups = Section(heads=2, width=3)
    parts = [groups.part(values, rank, 4, 0).tolist() for rank in range(4)]
    assert parts == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    for section, ranks in ((heads, 3), (groups, 4), (groups, 2)):
        assert section.divides(ranks)
        assert section.on_rank(ranks).size == len(section.part(values, 0, ranks, 0))
    assert not Section(heads=6).divides(4)
    assert sizes([heads, groups, Section(heads=2)]) == [6, 6, 2]
