from __future__ import annotations

import pytest
import torch

from megapack import Layout, MicroBatch
from megapack.rows.packed import PlacedRow
from megapack.rows.packing import pack_row
from megapack.rows.segments import Segments, row_segments
from megapack.samples import SampleBatch

pytestmark = pytest.mark.unit

SAMPLE_OF = torch.tensor([0, 0, 2, 2, 2, 3])
"""Sample 1 has no response tokens."""
VALUES = torch.tensor([1.0, 2.0, -0.5, 0.25, 3.0, 0.7])


def segments() -> Segments:
    return Segments(sample_of_R=SAMPLE_OF, set_of_n=torch.tensor([0, 1, 0, 1]))


def test_a_sample_without_response_tokens_sums_to_zero() -> None:
    assert segments().num_tokens_n.tolist() == [2, 0, 3, 1]
    assert segments().mean(VALUES).tolist() == pytest.approx([1.5, 0, 2.75 / 3, 0.7])
    assert segments().sum_sets(torch.tensor([1.0, 2.0, 4.0, 8.0])).tolist() == [5, 10, 5, 10]


def test_a_padding_row_has_empty_sums() -> None:
    batch = SampleBatch([[1, 2]])
    row = pack_row(batch, MicroBatch((), 4, 0, 0, 0), Layout())
    found = row_segments(PlacedRow.of(row, params=None))
    assert found.num_samples == 0
    assert found.spread(found.mean(torch.zeros(0))).shape == (0,)
