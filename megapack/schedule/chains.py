"""The losses of a chain: rows with pieces of the same samples have one objective.

An objective of whole samples needs the log-probs of all pieces, and on the last stage all forwards
of a chain come before its first backward. So each forward keeps the row's log-probs (or values),
and returns a number whose backward will send them what is known by then: the gradients of the
losses of the whole chain. The forward of the last piece finds these. To the objective, the rows of
a chain are one row.

Shape suffixes: R losses of all rows of the chain, n samples of these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megapack.rows.chain import Link
from megapack.rows.packed import PlacedRow
from megapack.rows.segments import Segments, chain_segments


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What an objective gets, of one row or of the rows of a chain."""

    values_R: Tensor
    """Log-probs, or values of a value head."""
    entropy_R: Tensor | None
    fields: Mapping[str, Tensor]
    """[R] each."""
    weights_R: Tensor
    segments: Segments
    rows: Sequence[PlacedRow] = ()
    """Those that the losses come from."""
    order_R: Tensor | None = None
    """See `TokenLosses`."""


Loss = Callable[[LossInputs], Tensor]
"""The weighted sum of losses; it also adds up the metrics."""


class ChainLosses:
    """The losses of the chains of one pass, on the last stage.

    Args:
        loss: called once with each chain.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def add(self, link: Link, inputs: LossInputs) -> Tensor:
        """Add the forward of a row that has pieces; forwards come in the order of the rows.

        Args:
            link: the place of the row in its chain.
            inputs: of the row, with the graph of its forward.

        Returns:
            A scalar: the chain's loss at its last row, else 0 (or a NaN, if the row has one). Its
            backward, which comes after the chain's last forward, gives each row the gradients of
            the chain's loss.
        """
        # Under the class: under this object, the chain would keep its pass alive, in a circle.
        forwards = link.kept(ChainLosses)
        forwards[link.index] = forward = _Forward(inputs, link)
        total = inputs.values_R.detach().sum() * 0.0
        if link.is_last:
            total = self._find_gradients(list(forwards.values()))
            forwards.clear()
        return _Later.apply(forward, total, *forward.graph)  # type: ignore[no-any-return, no-untyped-call]

    def _find_gradients(self, forwards: Sequence[_Forward]) -> Tensor:
        with torch.enable_grad():
            rows = [forward.leaves for forward in forwards]
            loss = self._loss(joined(rows, [forward.link for forward in forwards]))
            leaves = [leaf for forward in forwards for leaf in _tensors(forward.leaves)]
            # Losses of a chain without response tokens depend on none.
            gradients = iter(torch.autograd.grad(loss, leaves, materialize_grads=True))
        for forward in forwards:
            forward.gradients = [next(gradients) for _ in forward.graph]
        return loss.detach()


class _Forward:
    """One row's forward: its values with their graph, and as leaves of the chain's loss."""

    def __init__(self, inputs: LossInputs, link: Link) -> None:
        self.link = link
        self.graph = _tensors(inputs)
        self.leaves = _with_tensors(inputs, [x.detach().requires_grad_() for x in self.graph])
        self.gradients: list[Tensor] = []


class _Later(torch.autograd.Function):
    """A scalar whose backward sends gradients that are found after its forward."""

    @staticmethod
    def forward(ctx: Any, forward: _Forward, total: Tensor, *_: Tensor) -> Tensor:
        ctx.row = forward
        return total.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(scale * gradient for gradient in ctx.row.gradients))


def _tensors(inputs: LossInputs) -> list[Tensor]:
    """The tensors of inputs that have gradients."""
    given = (inputs.values_R, inputs.entropy_R, inputs.segments.scores_n)
    return [tensor for tensor in given if tensor is not None]


def _with_tensors(inputs: LossInputs, tensors: Sequence[Tensor]) -> LossInputs:
    """The inputs with other tensors, in the order of `_tensors`."""
    rest = iter(tensors)
    return replace(
        inputs,
        values_R=next(rest),
        entropy_R=None if inputs.entropy_R is None else next(rest),
        segments=replace(
            inputs.segments, scores_n=None if inputs.segments.scores_n is None else next(rest)
        ),
    )


def joined(rows: Sequence[LossInputs], links: Sequence[Link]) -> LossInputs:
    """The rows of a chain as one row, which has each of their samples once.

    Args:
        links: the place of each row.
    """
    first = rows[0]
    segments = chain_segments([row.segments for row in rows], links)
    # Losses are in the order of their samples.
    order_R = segments.sample_of_R.argsort(stable=True)

    def ordered(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))[order_R]

    entropies = [row.entropy_R for row in rows if row.entropy_R is not None]
    return LossInputs(
        values_R=ordered([row.values_R for row in rows]),
        entropy_R=ordered(entropies) if entropies else None,
        fields={name: ordered([row.fields[name] for row in rows]) for name in first.fields},
        weights_R=ordered([row.weights_R for row in rows]),
        segments=replace(segments, sample_of_R=segments.sample_of_R[order_R]),
        rows=[one for row in rows for one in row.rows],
        order_R=order_R,
    )
