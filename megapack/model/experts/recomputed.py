"""Which row a router runs on, when the layer around it is recomputed."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch


class RecomputedRows:
    """The rows of a router's checkpointed forwards in a training step, until they come again.

    A checkpointed forward runs without gradients and its recomputation, in the backward, with them.
    """

    def __init__(self) -> None:
        self._rows: deque[Any] = deque()

    def of_call(self, current: Any, of_backward: Any = None) -> Any:
        """The row of this call.

        Args:
            current: the row whose forward runs.
            of_backward: the row whose backward runs, if it is known. Without it, backward passes of
                a chunk run in the order of its forward passes.
        """
        if not torch.is_grad_enabled():
            self._rows.append(current)
        elif self._rows:
            index = next((k for k, row in enumerate(self._rows) if row is of_backward), 0)
            current = self._rows[index]
            del self._rows[index]
        return current

    def clear(self) -> None:
        """Forget the rows, when a step begins or ends."""
        self._rows.clear()
