"""The reference policy: weights that the trained ones are compared with.

An expert bias is a buffer that training moves, and it decides about routes: it belongs to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

_BIAS = "router.expert_bias"


class Reference:
    """The weights that a model has now, kept on the CPU.

    Attributes:
        initial: the kept value of each parameter and expert bias.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        params: list[torch.Tensor] = [p for chunk in chunks for p in chunk.parameters()]
        params += [b for chunk in chunks for n, b in chunk.named_buffers() if n.endswith(_BIAS)]
        self.initial = {p: p.detach().to("cpu", copy=True) for p in params}
        self._trained: dict[torch.Tensor, torch.Tensor] = {}

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Within the block the model has its initial weights.

        The trained ones wait on the CPU, in memory that is kept: on the GPU a second copy would
        come on top of gradients and optimizer state.
        """
        for param, initial in self.initial.items():
            self._trained.setdefault(param, torch.empty_like(initial)).copy_(param.detach())
        self._fill(self.initial)
        try:
            yield
        finally:
            self._fill(self._trained)

    def _fill(self, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        for param, value in values.items():
            param.data.copy_(value)
