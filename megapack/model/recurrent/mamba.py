"""Megatron's Mamba-2 layer over packed rows (Nemotron-H, Nemotron-3)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor

from megapack.model.attention.row import layer_row
from megapack.model.carried import earlier, leave
from megapack.model.fp32 import mark_fp32
from megapack.model.recurrent.choice import state_space_kernels
from megapack.model.recurrent.convolution import convolve_row
from megapack.model.recurrent.heads import HeadExchange, Section, sizes
from megapack.model.recurrent.scan import at_least_fp32, scan_row
from megapack.model.replaced import replaced
from megapack.model.sharded import Sharded


class PackedMambaMixer(MambaMixer):
    """A Mamba-2 mixer in which samples of a row do not see each other.

    Replaces `MambaMixer` in the spec of a layer; parameters, projections and checkpoints are
    Megatron's. Runs shared prefixes, samples in pieces and rows over several ranks. `prepare` and
    `forward` also run on Megatron's own layer, see `driven`.
    """

    runs_packed_rows = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _without_mamba_ssm():
            super().__init__(*args, **kwargs)
        self.prepare()
        # See `gpt.init.local_slice`; Megatron-Core 0.19 sets them itself.
        self.in_proj.weight.partition_sizes = sizes((self.values, *self.convolved, self.heads))
        for parameter in _convolution(self):
            vars(parameter)["partition_sizes"] = sizes(self.convolved)

        # Folders have them in fp32, and the decay of a long sample needs it.
        mark_fp32(self.A_log, self.dt_bias, self.D)

    def prepare(self: Any) -> None:
        """Note what `forward` reads besides what Megatron's constructor sets."""
        self.kernels = state_space_kernels()
        self.values = Section(self.nheads_local_tp, self.headdim)
        groups = Section(self.ngroups_local_tp, self.d_state)
        self.heads = Section(self.nheads_local_tp)
        self.convolved = (self.values, groups, groups)

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[tokens, 1, hidden] -> the same, and the bias of the last projection."""
        row = layer_row(self, packed_seq_params, self.pg_collection.cp)
        exchange = HeadExchange(row)
        projected = self.in_proj(hidden_states)[0][:, 0]
        widths = [self.values.size, sum(sizes(self.convolved)), self.heads.size]
        gate, xBC, step = projected.split(widths, dim=-1)
        xBC, step = exchange.whole_row((xBC, step), (self.convolved, (self.heads,)))
        state, tail = [(None, None), *earlier(row.link, self)][-1]
        weight, bias = (exchange.part(own, self.convolved) for own in _convolution(self))
        weight = weight.squeeze(1)
        xBC, tail = convolve_row(self.kernels.convolve, xBC, weight, bias, row.segments, tail)
        x, B, C = exchange.by_head(xBC, self.convolved)
        dt = F.softplus(at_least_fp32(step) + exchange.part(self.dt_bias, (self.heads,)))
        A_H = -at_least_fp32(exchange.part(self.A_log, (self.heads,))).exp()
        scan = partial(self.kernels.scan, A_H=A_H)
        out, state = scan_row(scan, (x, dt, B, C), row.segments, state)
        out = leave(row.link, self, out, (state, tail))
        out = out + x * exchange.part(self.D, (self.heads,))[:, None]
        out = exchange.own_slice(out.flatten(1).to(projected.dtype))
        return self.out_proj(self.norm(out, gate)[:, None])


def _convolution(mixer: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution; Megatron-Core 0.18 has a module of them."""
    if hasattr(mixer, "conv1d"):
        return mixer.conv1d.weight, mixer.conv1d.bias
    return mixer.conv1d_weight, mixer.conv1d_bias


class GatedGroupNorm(Sharded, torch.nn.Module):
    """RMS norm of groups of channels after a gate, as mamba_ssm's `RMSNormGated`, by torch.

    Megatron takes mamba_ssm's, which needs a GPU.
    """

    splits: ClassVar = {"weight": 0}

    def __init__(
        self, hidden_size: int, eps: float, group_size: int, dtype: torch.dtype, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps = eps
        self.group_size = group_size

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[T, D] each -> [T, D]."""
        gated = at_least_fp32(x) * F.silu(at_least_fp32(gate))
        groups = gated.unflatten(-1, (-1, self.group_size))
        scale = (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return ((groups * scale).flatten(-2) * self.weight).to(x.dtype)


@contextlib.contextmanager
def _without_mamba_ssm() -> Iterator[None]:
    """Within the block Megatron builds the layer without mamba_ssm and einops, too.

    Only Megatron's own forward uses einops.
    """
    if mamba_mixer.HAVE_MAMBA_SSM:
        yield
        return
    with (
        replaced(mamba_mixer, HAVE_MAMBA_SSM=True, HAVE_EINOPS=True),
        replaced(mamba_mixer, ExtendedRMSNorm=GatedGroupNorm),
        replaced(mamba_context_parallel, HAVE_EINOPS=True),
    ):
        yield
