"""The speeds of this machine's kernels, measured in seconds: attention, a product, the head.

A plan depends on ratios, and kernels of attention reach between a third and a half of what products
do. Three of them say more of a machine than the name of its GPU. `tools/calibrate.py` measures a
whole cost model instead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megapack import cpu
from megapack.base.choices import Device, Dtype, Kernel
from megapack.cost.assumed import PRODUCTS, GpuSpeed, cost_from_sizes
from megapack.cost.model import CostModel
from megapack.cost.sizes import ModelSizes
from megapack.layout import Layout
from megapack.model.attention.choice import choose_attention
from megapack.model.attention.varlen import varlen_causal_attention
from megapack.ranks.agree import agree

# Tokens of two samples, whose difference is attention's squares, and of a row of products: on a GPU
# they fill it, and on a core of a CPU they take a second in all.
_TOKENS = {"cuda": (4096, 16384), "cpu": (128, 256)}
_REPEATS = 5
# Shares of the peak are rounded to this: the same machine gives the same plans from run to run.
_STEP = 0.05


def measured_cost(
    sizes: ModelSizes,
    layout: Layout,
    *,
    mean_length: float,
    dtype: Dtype = "bf16",
    kernel: Kernel | None = None,
) -> CostModel:
    """The cost model of a model's sizes at this machine's speeds, for a loop of one's own.

        sizes = ModelSizes(num_layers=36, hidden_size=4096, ffn_hidden_size=12288, ...)
        cost = measured_cost(sizes, layout, mean_length=4000)
        plan = build_dp_schedule(lengths, layout=layout, max_tokens_per_gpu=16384, cost=cost)

    It takes about a second, and is a collective where torch.distributed runs: rank 0 measures, and
    all ranks get its model.

    Args:
        mean_length: tokens of a typical sample, see `cost_from_sizes`.
        dtype: of the model's activations.
        kernel: of attention; None: what megapack would choose here.

    Raises:
        ConfigError: the kernel cannot run here.
    """
    speed = measured_speed(sizes, dtype=dtype, tp=layout.tp, kernel=kernel)
    return cost_from_sizes(sizes, layout, speed, mean_length=mean_length)


def measured_speed(
    sizes: ModelSizes, *, dtype: Dtype = "bf16", tp: int = 1, kernel: Kernel | None = None
) -> GpuSpeed:
    """The speed of this machine for a model's kernels, see `measured_cost`."""
    device = torch.device("cuda" if cpu.uses_cuda() else "cpu")
    kernel = kernel or choose_attention("auto", dtype)
    if not dist.is_initialized():
        return _measured(sizes, dtype, tp, kernel, device)

    def work() -> GpuSpeed | None:
        return _measured(sizes, dtype, tp, kernel, device) if dist.get_rank() == 0 else None

    speeds = [agree(work, device=device)]
    dist.broadcast_object_list(speeds, src=0, device=device)
    (speed,) = speeds
    assert speed is not None
    return speed


def _measured(
    sizes: ModelSizes, dtype: Dtype, tp: int, kernel: Kernel, device: torch.device
) -> GpuSpeed:
    kind = sizes.last_kind
    where: Device = "cuda" if device.type == "cuda" else "cpu"
    short, tokens = _TOKENS[where]
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    # Its own, so that a run draws the same weights with and without this.
    generator = torch.Generator(device=device).manual_seed(0)

    def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
        made = [
            torch.randn(shape, generator=generator, device=device, dtype=torch_dtype)
            for shape in shapes
        ]
        return [tensor.requires_grad_() for tensor in made]

    # 1. A product with an MLP's matrix; the rest of a layer takes its part.
    width = max(1, sizes.dense_width // tp)
    flops = 2 * tokens * sizes.hidden_size * width
    seconds = _seconds(F.linear, drawn((tokens, sizes.hidden_size), (width, sizes.hidden_size)))
    rates = {"utilisation": PRODUCTS * 3 * flops / seconds}
    # 2. The vocabulary head, of fewer tokens: its logits are large.
    width = max(1, sizes.num_ids // tp)
    flops = 2 * short * sizes.hidden_size * width
    head = drawn((short, sizes.hidden_size), (width, sizes.hidden_size))
    rates["head_utilisation"] = 3 * flops / _seconds(_logprob_sum, head)
    # 3. Attention's squares: the difference of two samples.
    heads, groups = max(1, sizes.num_attention_heads // tp), max(1, kind.groups // tp)
    times = []
    for length in (short, tokens):
        shapes = [(length, heads), (length, groups), (length, groups)]
        times.append(
            _seconds(
                _attention(kernel, length, heads, groups, kind.head_width, device),
                drawn(*((*shape, kind.head_width) for shape in shapes)),
            )
        )
    flops = 2 * heads * kind.head_width * (tokens**2 - short**2)
    rates["attention_utilisation"] = 3 * flops / max(times[1] - times[0], 1e-9)
    speed = GpuSpeed.of(where, dtype)
    peak = 1e12 * (speed.peak_tflops or 0.0)
    # A machine may be faster than what is assumed of its kind.
    faster = max(1.0, *(rate / peak for rate in rates.values()))
    shares = {name: rate / peak / faster for name, rate in rates.items()}
    shares = {
        name: max(_STEP, round(_STEP * round(own / _STEP), 2)) for name, own in shares.items()
    }
    return replace(
        speed,
        peak_tflops=faster * peak / 1e12,
        utilisation=shares["utilisation"],
        attention_utilisation=shares["attention_utilisation"],
        head_utilisation=shares["head_utilisation"],
        is_measured=True,
    )


def _logprob_sum(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.log_softmax(F.linear(hidden, weight).float(), dim=-1)[:, 0]


def _attention(
    kernel: Kernel, length: int, heads: int, groups: int, width: int, device: torch.device
) -> Callable[..., Tensor]:
    """One causal sample through a kernel, on [tokens, heads, width]."""
    ends = torch.tensor([0, length], dtype=torch.int32, device=device)
    if kernel == "varlen":
        row = (ends, ends, length, length)
        return lambda q, k, v: varlen_causal_attention(q, k, v, *row, width**-0.5)
    if kernel == "te" and device.type == "cuda":
        from transformer_engine.pytorch import DotProductAttention

        module = DotProductAttention(
            heads, width, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="thd"
        )
        return lambda *qkv: module(
            *qkv,
            attn_mask_type="padding_causal",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=length,
            max_seqlen_kv=length,
        )

    def sdpa(*qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return sdpa


def _seconds(run: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """Median seconds of a forward and backward, after one that warms up."""
    times = []
    for _ in range(_REPEATS + 1):
        out = None
        started = time.perf_counter()
        out = run(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        if out.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
