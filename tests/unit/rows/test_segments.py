from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import spawn

from megapack import Layout, MicroBatch
from megapack.rows.packed import PlacedRow
from megapack.rows.packing import pack_row
from megapack.rows.segments import Segments, row_segments, sum_by_sample
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


def loss_of(segments: Segments, values_R: Tensor, weights_R: Tensor) -> Tensor:
    """Nonlinear in the sums, so that a gradient of the wrong scale is detected."""
    mean_n = segments.mean(values_R)
    set_n = segments.sum_sets(segments.sum(values_R.sin()))
    return (weights_R * segments.spread(mean_n.exp() + set_n.square())).sum()


def _cp_rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    weights = torch.linspace(0.2, 1.0, 6)
    # Parts of different samples; rank 1 holds no token of sample 0.
    mine = torch.tensor([0, 1, 3]) if rank == 0 else torch.tensor([2, 4, 5])
    whole_V = VALUES.clone().requires_grad_()
    whole = loss_of(segments(), whole_V, weights)
    whole.backward()
    values_R = VALUES[mine].clone().requires_grad_()
    part = Segments(
        sample_of_R=SAMPLE_OF[mine],
        set_of_n=torch.tensor([0, 1, 0, 1]),
        cp_group=torch.distributed.group.WORLD,
    )
    loss = loss_of(part, values_R, weights[mine])
    loss.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    assert whole_V.grad is not None
    assert values_R.grad is not None
    torch.testing.assert_close(total, whole.detach())
    torch.testing.assert_close(values_R.grad, whole_V.grad[mine])
    assert part.num_tokens_n.tolist() == [2, 0, 3, 1]
    # A rank without positions of the row still joins the all-reduce.
    none = VALUES[:0].clone().requires_grad_() if rank == 0 else VALUES.clone().requires_grad_()
    of = SAMPLE_OF[:0] if rank == 0 else SAMPLE_OF
    sums = sum_by_sample(none, of, 4, torch.distributed.group.WORLD)
    (sums if rank else 2 * sums).sum().backward()
    assert none.grad is not None
    assert none.grad.tolist() == ([] if rank == 0 else [3.0] * 6)
    torch.distributed.destroy_process_group()


@pytest.mark.weekly
def test_sums_and_gradients_of_cp_ranks_equal_the_whole_row(tmp_path: Path) -> None:
    spawn(_cp_rank, (str(tmp_path),), nprocs=2)
