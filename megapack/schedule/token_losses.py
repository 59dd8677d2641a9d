"""Which token a loss that is not finite comes from, and what its numbers were.

The tensors are those that the last stage has made anyway. They are read if a step's loss or
gradients are not finite, so other steps never wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapack.rows.packed import PlacedRow


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """The losses of a row, or of all rows of a chain, [R]."""

    rows: Sequence[PlacedRow]
    order_R: Tensor | None
    """Index of each loss among those of the rows, one row after the other; None: in their order."""
    losses_R: Tensor
    values_R: Tensor
    """Log-probs, or values of a value head."""
    fields: Mapping[str, Tensor]
    reads: str
    """What `values_R` is, for the text."""

    @property
    def largest(self) -> float:
        """The largest absolute loss; an infinity stands for a NaN."""
        sizes_R = self._sizes()
        return float(sizes_R.max()) if sizes_R.numel() else 0.0

    def worst(self) -> str:
        """The token with the largest loss and its numbers; of equal ones, as in a loss of a whole
        sample, the one whose log-prob is the furthest from that of another policy."""
        sizes_R = self._sizes()
        if not sizes_R.numel():
            return "no token has a loss"
        fields = {name: one for name, one in self.fields.items() if one.shape == sizes_R.shape}
        gaps_R = torch.zeros_like(sizes_R)
        for name, one_R in fields.items():
            if name.endswith("logprobs"):
                gap_R = (self.values_R.double() - one_R).abs().nan_to_num(nan=math.inf)
                gaps_R = torch.maximum(gaps_R, gap_R)
        at = int(torch.where(sizes_R == sizes_R.max(), gaps_R, -1.0).argmax())
        numbers = {"loss": self.losses_R, self.reads: self.values_R, **fields}
        own = ", ".join(f"{name} {one_R[at].item():.6g}" for name, one_R in numbers.items())
        return f"{self._place(at)} has {own}"

    def _sizes(self) -> Tensor:
        return self.losses_R.double().abs().nan_to_num(nan=math.inf)

    def _place(self, at: int) -> str:
        if self.order_R is not None:
            at = int(self.order_R[at])
        for row in self.rows:
            losses = row.losses
            if at < losses.sample_of_R.numel():
                break
            at -= losses.sample_of_R.numel()
        index = int(losses.sample_of_R[at])
        token = int(losses.label_index_R[at]) - sum(row.lengths[:index])
        label = int(row.labels_T[losses.positions_R[at]])
        return f"token {token} of sample {row.samples[index]} (from 0, prompt included; id {label})"
