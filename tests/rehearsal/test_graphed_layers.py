"""The stand-in of CUDA graphs refuses what a GPU would refuse, or would replay wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megapack.cpu.te import KernelFault
from tests.rehearsal.capture import HostError
from tests.rehearsal.graphed_layers import graphed_layers

pytestmark = pytest.mark.unit


class Scale(torch.nn.Module):
    """A layer as Megatron's are called."""

    layer_number = 1

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 2.0))

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        return (hidden * self.weight,)

    def _te_cuda_graph_capture(self, hidden: Tensor) -> tuple[Tensor]:
        out: tuple[Tensor] = self(hidden)
        return out


class Read(Scale):
    """Reads a value on the host."""

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        return (hidden * float(self.weight.sum()),)


class Counted(Scale):
    """Another number in each pass."""

    calls = 0

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        self.calls += 1
        return (hidden * self.weight * self.calls,)


def graph(layer: Any) -> Any:
    return graphed_layers((layer,), [(torch.ones(2, 3, requires_grad=True),)])[0]


def test_a_graph_runs_inputs_of_the_captured_shape_alone() -> None:
    replay = graph(Scale())
    (out,) = replay(torch.full((2, 3), 5.0), is_first_microbatch=False)
    assert torch.equal(out, torch.full((2, 3), 10.0))
    with pytest.raises(KernelFault, match="captured with"):
        replay(torch.ones(4, 3), is_first_microbatch=False)
    with pytest.raises(KernelFault, match="not captured: packed_seq_params"):
        replay(torch.ones(2, 3), is_first_microbatch=False, packed_seq_params=None)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (Read, HostError, "_local_scalar_dense"),
        (Counted, KernelFault, "other operations the second time"),
    ],
)
def test_a_pass_that_no_graph_repeats_is_refused(
    kind: type[Scale], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        graph(kind())


def test_hooks_are_refused() -> None:
    layer = Scale()
    layer.register_forward_hook(lambda *_: None)
    with pytest.raises(KernelFault, match="layer 1 has hooks"):
        graph(layer)
