"""The speeds of this machine's kernels, measured in seconds: attention, a product, the head.

A plan depends on ratios, and kernels of attention reach between a third and a half of what products
do. Three of them say more of a machine than the name of its GPU. `tools/calibrate.py` measures a
whole cost model instead.
"""

from __future__ import annotations

import logging
import math
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
from megapack.cost.sizes import FLASH_WIDTH, ModelSizes
from megapack.errors import first_line
from megapack.layout import Layout
from megapack.model.attention.choice import choose_attention
from megapack.model.attention.varlen import varlen_causal_attention

logger = logging.getLogger(__name__)

# Tokens of two samples, whose difference is attention's squares, and of a row of products: on a GPU
# they fill it, and on a core of a CPU they take a second in all.
_TOKENS = {"cuda": (4096, 16384), "cpu": (128, 256)}
_REPEATS = 5
# Shares of the peak are rounded to this, so that the same machine mostly gives the same plans.
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

    If a kernel fails, speeds are assumed, with a warning.
    """
    speed = measured_speed(sizes, dtype=dtype, tp=layout.tp, kernel=kernel)
    return cost_from_sizes(sizes, layout, speed, mean_length=mean_length)


def measured_speed(
    sizes: ModelSizes, *, dtype: Dtype = "bf16", tp: int = 1, kernel: Kernel | None = None
) -> GpuSpeed:
    """The speed of this machine for a model's kernels, see `measured_cost`."""
    device = torch.device("cuda" if cpu.uses_cuda() else "cpu")
    speeds = [GpuSpeed.of("cuda" if device.type == "cuda" else "cpu", dtype)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            speeds[0] = _measured(sizes, dtype, tp, kernel or choose_attention("auto", dtype))
        except Exception as error:  # an assumed speed is better than no run
            logger.warning("the speeds of this machine are assumed: %s", first_line(error))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.broadcast_object_list(speeds, src=0, device=device)
    return speeds[0]


def _measured(sizes: ModelSizes, dtype: Dtype, tp: int, kernel: Kernel) -> GpuSpeed:
    where: Device = "cuda" if cpu.uses_cuda() else "cpu"
    device = torch.device(where)
    short, long = _TOKENS[where]
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    # Its own, so that a run draws the same weights with and without this.
    generator = torch.Generator(device=device).manual_seed(0)

    def seconds(run: Callable[..., Tensor], *shapes: tuple[int, ...]) -> float:
        """Median seconds of a forward and backward, after one that warms up."""
        inputs = [torch.empty(shape, dtype=torch_dtype, device=device) for shape in shapes]
        for tensor in inputs:
            tensor.normal_(generator=generator).requires_grad_()
        times = []
        for _ in range(_REPEATS + 1):
            started = time.perf_counter()
            out = run(*inputs)
            torch.autograd.grad(out, inputs, torch.ones_like(out))
            if out.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    # 1. Products with an MLP's matrix, and with the head's, of fewer tokens: logits are large.
    hidden, rates = sizes.hidden_size, []
    for run, tokens, width in (
        (F.linear, long, sizes.dense_width // tp),
        (lambda h, w: F.log_softmax(F.linear(h, w).float(), -1)[:, 0], short, sizes.num_ids // tp),
    ):
        took = seconds(run, (tokens, hidden), (width, hidden))
        rates.append(6 * tokens * hidden * width / took)
    # The rest of a layer takes its part beside the product.
    rates[0] *= PRODUCTS
    # 2. Attention's squares: the difference of two samples. Fused kernels have no wider heads.
    kind = sizes.last_kind
    heads, groups = max(1, sizes.num_attention_heads // tp), max(1, kind.groups // tp)
    width = min(kind.head_width, FLASH_WIDTH)
    took = -seconds(*_attention(kernel, short, heads, groups, width, device))
    took += seconds(*_attention(kernel, long, heads, groups, width, device))
    rates.append(6 * heads * width * (long**2 - short**2) / max(took, 1e-9))
    # 3. A machine may be faster than what is assumed of its kind, in steps of a fifth.
    speed = GpuSpeed.of(where, dtype)
    peak = 1e12 * (speed.peak_tflops or 0.0)
    peak *= 1.2 ** max(0, math.ceil(math.log(max(rates) / peak, 1.2)))
    product, head, attention = (
        round(_STEP * max(1, round(rate / peak / _STEP)), 2) for rate in rates
    )
    return replace(
        speed,
        peak_tflops=peak / 1e12,
        utilisation=product,
        attention_utilisation=attention,
        head_utilisation=head,
        is_measured=True,
    )


def _attention(
    kernel: Kernel, length: int, heads: int, groups: int, width: int, device: torch.device
) -> tuple[Callable[..., Tensor], *tuple[tuple[int, ...], ...]]:
    """One causal sample through a kernel, and the shapes of its queries, keys and values."""
    ends = torch.tensor([0, length], dtype=torch.int32, device=device)
    shapes = ((length, heads, width), (length, groups, width), (length, groups, width))
    if kernel == "varlen":
        row = (ends, ends, length, length)
        return lambda q, k, v: varlen_causal_attention(q, k, v, *row, width**-0.5), *shapes
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
        ), *shapes

    def sdpa(*qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return sdpa, *shapes
