"""Megatron's own GatedDeltaNet and MambaMixer on a CPU: torch in place of the kernels.

`install` replaces what their forward calls, sample by sample and token by token. So a test sees
what Megatron passes to its kernels for a packed row: `cu_seqlens`, or `seq_idx`. Call it in a child
process that has called `launch.start("cpu")`.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

REARRANGED = {
    "l b d -> b l d": lambda x: x.transpose(0, 1),
    "b l d -> l b d": lambda x: x.transpose(0, 1),
    "d 1 w -> d w": lambda x: x.squeeze(1),
}


class GatedNorm(torch.nn.Module):
    """mamba_ssm's RMSNorm of groups, after a gate if there is one."""

    def __init__(self, width: int, *, eps: float, group_size: int, dtype: Any, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        x = x if z is None else x * F.silu(z)
        groups = torch.unflatten(x, -1, (-1, self.group_size))
        groups = groups * (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        normed: Tensor = groups.flatten(-2) * self.weight
        return normed


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Causal convolution of one sample: x [T, D], weight [D, W]."""
    padded = F.pad(x.T[None], (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))[0].T)


def split_conv_scan(
    zxbcdt: Tensor,
    weight: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    headdim: int,
    ngroups: int,
    seq_idx: Tensor | None,
    **_: Any,
) -> Tensor:
    """mamba_ssm's mamba_split_conv1d_scan_combined; each index of `seq_idx` is a sequence."""
    row, heads = zxbcdt[0], len(A)
    inner = heads * headdim
    state = (len(weight) - inner) // ngroups // 2
    lengths = [len(row)]
    if seq_idx is not None:
        assert seq_idx.shape == (1, len(row))
        assert seq_idx.dtype == torch.int32
        lengths = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    return torch.cat(
        [
            scan(part, weight, bias, dt_bias, A, D, sizes=(inner, ngroups, state))
            for part in torch.split(row, lengths)
        ]
    )[None]


def scan(
    row: Tensor,
    weight: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    *,
    sizes: tuple[int, int, int],
) -> Tensor:
    """Mamba-2 of one sample: [T, all projections] -> [T, inner]."""
    inner, ngroups, width = sizes
    heads = len(A)
    z, xBC, dt = torch.split(row, [inner, len(weight), heads], dim=-1)
    x, B, C = torch.split(
        convolve(xBC, weight, bias), [inner, ngroups * width, ngroups * width], dim=-1
    )
    x, dt = torch.unflatten(x, -1, (heads, -1)), F.softplus(dt + dt_bias)
    B, C = (
        torch.unflatten(part, -1, (ngroups, width)).repeat_interleave(heads // ngroups, 1)
        for part in (B, C)
    )
    state = row.new_zeros(heads, inner // heads, width)
    outputs = []
    for t in range(len(row)):
        new = torch.einsum("h,hp,hn->hpn", dt[t], x[t], B[t])
        state = state * (dt[t] * A).exp()[:, None, None] + new
        outputs.append(torch.einsum("hpn,hn->hp", state, C[t]) + x[t] * D[:, None])
    return torch.stack(outputs).flatten(1) * F.silu(z)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla's chunk_gated_delta_rule of a packed row, [1, T, heads, width] each.

    Args:
        g: [1, T, heads], or also [1, T, heads, width]: decays of each channel of the keys.
    """
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    decay = g.exp() if g.dim() == 4 else g.exp()[..., None]
    outputs, states = [], []
    for n, (first, last) in enumerate(spans(cu_seqlens)):
        state = q.new_zeros(q.shape[2], q.shape[3], v.shape[3])
        state = state if initial_state is None else initial_state[n]
        for t in range(first, last):
            state = state * decay[0, t][..., None]
            seen = torch.einsum("hkv,hk->hv", state, k[0, t])
            new = (v[0, t] - seen) * beta[0, t][:, None]
            state = state + torch.einsum("hk,hv->hkv", k[0, t], new)
            outputs.append(torch.einsum("hkv,hk->hv", state, q[0, t]) * q.shape[3] ** -0.5)
        states.append(state)
    return torch.stack(outputs)[None], torch.stack(states) if output_final_state else None


def kimi_delta_rule(
    *, g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, **others: Any
) -> tuple[Tensor, Tensor | None]:
    """fla's chunk_kda with `use_gate_in_kernel`."""
    rate, step = A_log.exp()[:, None], g + dt_bias.view(g.shape[2:])
    bounded = None if lower_bound is None else lower_bound * torch.sigmoid(rate * step)
    return delta_rule(g=-rate * F.softplus(step) if bounded is None else bounded, **others)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, cu_seqlens: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """fla's causal_conv1d of a packed row, or of one sequence."""
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, x.shape[1]])
    parts = [convolve(x[0, first:last], weight, bias) for first, last in spans(cu_seqlens)]
    return torch.cat(parts)[None], None


def spans(cu_seqlens: Tensor) -> Iterator[tuple[int, int]]:
    """First token of each sample, and the one after its last."""
    return itertools.pairwise(cu_seqlens.tolist())


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """fla's l2norm."""
    return x * (x.square().sum(dim, keepdim=True) + eps).rsqrt()


def install() -> None:
    """Replace the kernels of both layers, in the modules of Megatron that have imported them."""
    # Megatron's fused functions do not compile on a CPU.
    torch._dynamo.config.disable = True
    for module in (mamba_mixer, mamba_context_parallel):
        module.HAVE_EINOPS = True
    mamba_mixer.rearrange = lambda x, pattern, **_: REARRANGED[pattern](x)
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = GatedNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = split_conv_scan
    mamba_mixer.is_mamba_min_version = mamba_mixer.is_causal_conv1d_min_version = lambda _: True
    from megatron.core.ssm import gated_delta_net

    # One module before Megatron-Core 0.19, a package since.
    modules = [m for n, m in sys.modules.items() if n.startswith(gated_delta_net.__name__)]
    names = {
        "HAVE_FLA": True,
        "l2norm": l2norm,
        "causal_conv1d": causal_conv1d,
        "chunk_gated_delta_rule": delta_rule,
    }
    for module in modules:
        for name in names.keys() & vars(module).keys():
            setattr(module, name, names[name])


@contextlib.contextmanager
def of_hybrids() -> Iterator[None]:
    """Within the block, the job's hybrid models are built of Megatron's own recurrent layers."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    from megapack.job.gpt import hybrid

    install()
    own = {"PackedGatedDeltaNet": GatedDeltaNet, "PackedMambaMixer": MambaMixer}
    with mock.patch.multiple(hybrid, **own):
        yield


class ShortConvolution(torch.nn.Conv1d):
    """fla's module."""

    def __init__(self, hidden_size: int, kernel_size: int, *, bias: bool = False) -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, cu_seqlens: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        return causal_conv1d(x, self.weight.squeeze(1), None, cu_seqlens=cu_seqlens)


class FusedRMSNormGated(torch.nn.Module):
    """fla's module."""

    def __init__(self, width: int, *, eps: float, activation: str, dtype: Any, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps, self.activation = eps, getattr(F, activation)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight
        return normed * self.activation(gate)  # type: ignore[no-any-return]


def install_fla() -> None:
    """Let frameworks' own layers import flash-linear-attention: these functions and modules."""
    # It asks which packages are there.
    import transformers.models.qwen3_next.modeling_qwen3_next  # noqa: F401

    names: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.modules": {
            "ShortConvolution": ShortConvolution,
            "FusedRMSNormGated": FusedRMSNormGated,
        },
        "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
        "fla.modules.l2norm": {"l2norm": l2norm},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": delta_rule},
        "fla.ops.kda": {"chunk_kda": kimi_delta_rule},
    }
    for name, members in names.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        vars(module).update(members)
        sys.modules[name] = module


def mamba(config: Any, groups: Any) -> MambaMixer:
    """Megatron's MambaMixer with its own linear layers."""
    submodules = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return MambaMixer(config, submodules, config.hidden_size, layer_number=1, pg_collection=groups)


def gated_delta_net(config: Any, groups: Any) -> Any:
    """Megatron's GatedDeltaNet with its own linear layers."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

    from megapack.job.gpt.specs import packed_norm

    submodules = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=packed_norm(config), out_proj=RowParallelLinear
    )
    return GatedDeltaNet(config, submodules, layer_number=1, pg_collection=groups)
