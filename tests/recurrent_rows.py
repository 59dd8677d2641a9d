"""Recurrent layers over rows of segments, and the same token by token, one path at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megapack.model.recurrent.convolution import ConvolutionKernel, convolve_row, torch_convolution
from megapack.model.recurrent.delta_rule import torch_delta_rule
from megapack.model.recurrent.scan import scan_row
from megapack.model.recurrent.segments import Segments, row_segments
from megapack.model.recurrent.state_space import torch_state_space
from megapack.prefixes import EARLIER, Branch

WIDTH = 4
"""Tokens that the convolution sees."""

Kind = Literal["delta_rule", "state_space"]
Outs = tuple[Tensor, Tensor | None, Tensor | None]
_TORCH: dict[str, Any] = {"delta_rule": torch_delta_rule, "state_space": torch_state_space}


def segments_of(
    lengths: Sequence[int],
    parents: Sequence[int],
    kept: int | None = None,
    device: str = "cpu",
) -> Segments:
    """A row of branches with these lengths; further lengths are those of dummies."""
    starts = [sum(lengths[:k]) for k in range(len(parents))]
    branches = [
        Branch(start=start, tokens=tokens, offset=0, parent=parent, samples=(0,), end=0)
        for start, tokens, parent in zip(starts, lengths, parents, strict=False)
    ]
    return row_segments(lengths, branches, kept, device=device)


@dataclass(frozen=True)
class Layer:
    """A convolution and a scan, with parameters and inputs drawn at random."""

    kind: Kind
    groups: int = 2
    """Key heads, or groups of B and C."""
    heads: int = 4
    width: int = 5
    """Channels of a key, or of a state."""
    value: int = 3
    """Channels of a value."""
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    @property
    def channels(self) -> int:
        return 2 * self.groups * self.width + self.heads * self.value

    def carried(self) -> list[Tensor]:
        """A state and a tail that an earlier row has left."""
        size = (self.width, self.value) if self.kind == "delta_rule" else (self.value, self.width)
        return self._drawn([(1, self.heads, *size), (WIDTH - 1, self.channels)], seed=1)

    def tensors(self, tokens: int) -> list[Tensor]:
        """Inputs of a row [tokens, ...], three, and parameters."""
        row = [(tokens, self.channels), (tokens, self.heads), (tokens, self.heads)]
        parameters = [(self.channels, WIDTH), (self.channels,), (self.heads,)]
        *others, log_A = self._drawn([*row, *parameters], seed=tokens)
        # Slow decays, so that states reach far, and their differences are exact in fp32.
        return [*others, (log_A.detach() - 3).requires_grad_()]

    def _drawn(self, shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = (torch.randn(shape, generator=generator, dtype=self.dtype) for shape in shapes)
        return [values.to(self.device).requires_grad_() for values in drawn]

    def run(
        self,
        tensors: Sequence[Tensor],
        segments: Segments,
        carried: Sequence[Tensor] | None,
        kernels: tuple[ConvolutionKernel, Any] | None = None,
    ) -> Outs:
        """Out, and the state and the tail that the row leaves.

        Args:
            kernels: of the convolution and of the scan; None: torch's.
        """
        convolution, scan = kernels or (torch_convolution, _TORCH[self.kind])
        mixed, step, rate, weight, bias, log_A = tensors
        state, tail = (None, None) if carried is None else carried
        mixed, tail = convolve_row(convolution, mixed, weight, bias, segments, tail)
        inputs, A_H = self._scanned(mixed, step, rate, log_A)
        if self.kind == "state_space":
            scan = partial(scan, A_H=A_H)
        out, state = scan_row(scan, inputs, segments, state)
        return out, state, tail

    def token_by_token(
        self, tensors: Sequence[Tensor], segments: Segments, carried: Sequence[Tensor] | None
    ) -> Outs:
        """The same as `run`. Each segment runs with all tokens of its path."""
        outs = []
        left: tuple[Tensor | None, Tensor | None] = (None, None)
        for k, tokens in enumerate(segments.lengths):
            path, root = path_of(segments, k)
            own = [*(values[path] for values in tensors[:3]), *tensors[3:]]
            out, *ends = self._sequence(own, carried if root == EARLIER else None)
            outs.append(out[len(out) - tokens :])
            if k == segments.kept:
                left = (ends[0], ends[1])
        return torch.cat(outs), *left

    def _scanned(
        self, mixed: Tensor, step: Tensor, rate: Tensor, log_A: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        keys = self.groups * self.width
        first, second, values = mixed.split([keys, keys, self.heads * self.value], dim=1)
        first, second = (x.unflatten(1, (self.groups, -1)) for x in (first, second))
        values = values.unflatten(1, (self.heads, -1))
        A_H = -log_A.exp()
        dt = F.softplus(step)
        if self.kind == "delta_rule":
            return [first, second, values, A_H * dt, rate.sigmoid()], A_H
        return [values, dt, first, second], A_H

    def _sequence(
        self, tensors: Sequence[Tensor], carried: Sequence[Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed, step, rate, weight, bias, log_A = tensors
        zeros = [torch.zeros_like(values) for values in self.carried()]
        state, tail = zeros if carried is None else carried
        state = state[0]
        seen = torch.cat([tail, mixed])
        convolved = bias + sum(seen[k : k + len(mixed)] * weight[:, k] for k in range(WIDTH))
        inputs, A_H = self._scanned(convolved * convolved.sigmoid(), step, rate, log_A)
        outs = []
        for token in zip(*inputs, strict=True):
            out, state = self._token(token, state, A_H)
            outs.append(out)
        return torch.stack(outs), state[None], seen[len(mixed) :]

    def _token(self, token: Sequence[Tensor], state: Tensor, A_H: Tensor) -> tuple[Tensor, Tensor]:
        repeats = self.heads // self.groups
        if self.kind == "delta_rule":
            query, key, value, decay, beta = token
            query, key = (
                (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, 0)
                for x in (query, key)
            )
            state = state * decay.exp()[:, None, None]
            error = value - torch.einsum("hkv,hk->hv", state, key)
            state = state + torch.einsum("h,hk,hv->hkv", beta, key, error)
            return torch.einsum("hkv,hk->hv", state, query) / self.width**0.5, state
        x, dt, B, C = token
        B, C = (y.repeat_interleave(repeats, 0) for y in (B, C))
        state = state * (dt * A_H).exp()[:, None, None] + torch.einsum("h,hp,hs->hps", dt, x, B)
        return torch.einsum("hps,hs->hp", state, C), state


def path_of(segments: Segments, index: int) -> tuple[Tensor, int]:
    """The positions of a segment and of all that it continues, and what the first one continues."""
    starts = [sum(segments.lengths[:k]) for k in range(len(segments.lengths))]
    parts: list[Tensor] = []
    while index >= 0:
        start = starts[index]
        parts.insert(0, torch.arange(start, start + segments.lengths[index]))
        index = segments.parents[index]
    return torch.cat(parts), index


def error(
    layer: Layer, segments: Segments, run: Callable[..., Outs], wanted: Callable[..., Outs]
) -> float:
    """The largest relative error of outputs, of what the row leaves, and of all gradients."""
    carried = layer.carried() if EARLIER in segments.parents else None
    tensors = layer.tensors(sum(segments.lengths))
    leaves = [*tensors, *(carried or [])]
    found, by_other = (
        with_gradients(way(tensors, segments, carried), leaves) for way in (run, wanted)
    )
    return largest_error(found, by_other)


def with_gradients(outs: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    """What is there of the outputs, and the gradients of a sum of it with weights."""
    there = [out for out in outs if out is not None]
    total = sum((out * _weights(out)).sum() for out in there)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return [*(out.detach() for out in there), *gradients]


def _weights(values: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, values.numel(), dtype=torch.float64).mul(9).sin()
    return weights.view_as(values).to(values)


def largest_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest number of each tensor."""
    assert [x.shape for x in found] == [x.shape for x in wanted]
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)
