"""`SchedulePass`: what the parts of one run of the schedule tell each other."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from megapack.rows.packed import RoutingRow

MAXIMUM = "_max"
"""Ending of the names of metrics of which a step has the maximum; all others are added up."""


class SchedulePass:
    """One run of the schedule: its current row, and the results of routers and last stage.

    Args:
        token_weight: 1 / N, the weight of a real token in the auxiliary losses of a training pass;
            None for a pass without a backward.
        record: whether routers store their choices in the rows.

    Attributes:
        routing: the row of the current forward, as routers see it.
        recomputed: the row of the current backward; None if nothing tells it.
        sums: the last stage's weighted sums of losses and metrics over the rows so far, and its
            maxima of those whose name ends with `MAXIMUM`.
        outputs: the last stage's values, name -> sample -> values.
        router_sums: sums of auxiliary losses, without their coefficients, over rows and layers.
    """

    def __init__(self, *, token_weight: float | None = None, record: bool = False) -> None:
        self.token_weight = token_weight
        self.record = record
        self.routing: RoutingRow | None = None
        self.recomputed: RoutingRow | None = None
        self.sums: dict[str, Tensor] = {}
        self.outputs: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self.router_sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add the weighted sum of a loss or metric over a row, or take its maximum."""
        value = value.detach().double()
        before = self.sums.get(name)
        if before is not None:
            value = torch.maximum(before, value) if name.endswith(MAXIMUM) else before + value
        self.sums[name] = value

    def add_router_loss(self, name: str, loss: Tensor) -> None:
        """Add the auxiliary loss of one row and layer, without its coefficient."""
        self.router_sums[name] = self.router_sums.get(name, 0.0) + loss.detach().double()
