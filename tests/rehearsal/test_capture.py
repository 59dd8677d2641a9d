"""What stands in for the capture of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.rehearsal.capture import Capture, HostError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0]),
    ],
)
def test_what_the_host_reads_or_gives_is_refused(read: Callable[[Tensor], object]) -> None:
    x = torch.ones(3)
    with pytest.raises(HostError), Capture():
        read(x)


def captured(x: Tensor, scale: float = 2.0) -> list[object]:
    with Capture() as run:
        (x.sin() * scale).sum()
    return list(run.operations)


def test_a_run_at_the_same_addresses_is_the_same() -> None:
    x = torch.ones(3)
    first = captured(x)
    x.copy_(torch.zeros(3))
    assert captured(x) == first
    assert len(first) == 3


def test_a_moved_tensor_another_shape_or_another_number_is_not() -> None:
    x = torch.ones(3)
    first = captured(x)
    assert captured(x.clone()) != first
    assert captured(x[:2]) != first
    assert captured(x, 3.0) != first
