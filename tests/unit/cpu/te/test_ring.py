"""A ring's helpers: steps over parts of the keys give attention over all of them."""

from __future__ import annotations

import pytest
import torch

from megapack.cpu.te import KernelFault, ring
from tests.unit.cpu.te.by_hand import ends

pytestmark = pytest.mark.unit

SLICES = ends([4, 6])
FIRST, SECOND = [0, 1, 4, 5, 6], [2, 3, 7, 8, 9]


def test_halves_of_packed_slices() -> None:
    rows = torch.arange(10.0).view(10, 1, 1)
    assert ring.thd_read_half_tensor(rows, SLICES, 0).flatten().tolist() == FIRST
    both = torch.stack([rows, rows + 10])
    halves = ring.thd_read_half_tensor(both, SLICES, 1).flatten(1).tolist()
    assert halves == [SECOND, [x + 10 for x in SECOND]]


def test_outputs_of_two_steps_are_weighted_by_their_shares() -> None:
    first, second = torch.randn(2, 10, 2, 3, dtype=torch.float64).unbind()
    lse = torch.randn(2, 2, 10, dtype=torch.float64)
    total = torch.logaddexp(lse[0], lse[1])
    out = torch.zeros_like(first)
    for part, own in ((first, lse[0]), (second, lse[1])):
        ring.thd_out_correction(out, part, total, own.contiguous(), SLICES, False, True)
    share = (lse[0] - total).exp().t()[..., None]
    torch.testing.assert_close(out, first * share + second * (1 - share))


def test_a_step_of_second_halves_changes_only_these() -> None:
    lse, step = torch.zeros(2, 10), torch.zeros(2, 5)
    ring.thd_second_half_lse_correction(lse, step, SLICES, True)
    assert (lse[0] > 0.69).nonzero().flatten().tolist() == SECOND
    assert torch.equal(ring.thd_read_second_half_lse(lse, SLICES, True, 6)[:, :5], lse[:, SECOND])
    out = torch.zeros(10, 2, 3)
    ring.thd_out_correction(out, torch.ones(5, 2, 3), lse, step, SLICES, True, True)
    torch.testing.assert_close(out[SECOND], torch.full((5, 2, 3), 0.5))
    assert not out[FIRST].any()


@pytest.mark.parametrize(
    ("actions", "want"),
    [
        (("none", "add"), [1, 1, 2, 2]),
        (("copy", "none"), [1, 1, 1, 1]),
        (("add", "copy"), [2, 2, 1, 1]),
        (("zero", "copy"), [0, 0, 1, 1]),
    ],
)
def test_gradients_of_a_step_are_copied_or_added(actions: tuple[str, str], want: list[int]) -> None:
    grad = torch.ones(4, 1, 1)
    part = torch.ones(4 if set(actions) <= {"copy", "add"} else 2, 1, 1)
    ring.thd_grad_correction(grad, part, ends([4]), *actions)
    assert grad.flatten().tolist() == want


def test_indices_of_a_ranks_slices() -> None:
    found = ring.thd_get_partitioned_indices(ends([8, 4]), 12, 2, 1)
    assert found.tolist() == [2, 3, 4, 5, 9, 10]
    with pytest.raises(KernelFault, match="6 tokens for 2 \\* 2 chunks"):
        ring.thd_get_partitioned_indices(ends([6]), 6, 2, 0)


def test_a_request_is_waited_for_once() -> None:
    waits = []

    class Request:
        def wait(self) -> None:
            waits.append(1)

    request = ring.WaitedOnce(Request())
    request.wait()
    request.wait()
    assert len(waits) == 1


def test_odd_slices_and_unpacked_statistics_are_faults() -> None:
    with pytest.raises(KernelFault, match=r"slices without halves: \[0, 3\]"):
        ring.thd_read_half_tensor(torch.zeros(3, 1, 1), ends([3]), 0)
    with pytest.raises(KernelFault, match="not packed"):
        ring.thd_read_second_half_lse(torch.zeros(1, 2, 4), SLICES, False, 5)
