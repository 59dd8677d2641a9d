"""A cost model without measurements: the model's operations on a GPU whose speed is assumed.

A plan depends on ratios: attention to matrices, the vocabulary head to a chunk's layers, a
micro-batch's fixed cost to its tokens. Their operations follow from sizes, and their speeds differ:
kernels of attention reach half of what products do. `model.speed` measures the three speeds in
seconds, `tools/calibrate.py` a whole cost model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from megapack.base.choices import Device, Dtype
from megapack.cost.layers import LayerKind
from megapack.cost.model import CostModel
from megapack.cost.sizes import ModelSizes
from megapack.cost.stages import StageLayers
from megapack.cost.tower import TowerSizes
from megapack.errors import ConfigError
from megapack.layout import Layout

# By GPU: the peaks in bf16 and in fp32, which does not use tensor cores, without sparsity (NVIDIA's
# data sheets), and the share of the peak that attention's kernels reach (sources in
# docs/maintainers/calibration.md). An H200 has the cores of an H100.
_GPUS = {"a100": (312.0, 19.5, 0.55), "h100": (989.4, 66.9, 0.35), "b200": (2250.0, 75.0, 0.45)}
GPU_NAMES = tuple(_GPUS)
# One core with AVX2 at 3 GHz: 2 units * 8 numbers * 2 operations * 3e9 = 96 GFLOPS.
_CPU_CORE_TFLOPS = 0.1
# A kernel of attention takes about as long for a sample as if each of its tokens met so many keys
# more, half of which are operations of a causal sample: short samples do not fill its blocks. Row
# tokens of several ranks meet as many again for each further rank. docs/maintainers/calibration.md
# has what an H200 and an H100 take.
ATTENTION_TOKENS = 600.0
ATTENTION_TOKENS_PER_RANK = 325.0
# The part of a layer's forward without attention's kernels that products take. The rest is in
# norms, activations and rotary embeddings, and has no weight gradients that can wait.
PRODUCTS = 5 / 6


@dataclass(frozen=True, kw_only=True)
class GpuSpeed:
    """Speed of a GPU, to predict seconds from a model's sizes."""

    # docs/maintainers/calibration.md has the sources of all numbers. Large products reach 0.7 to
    # 0.84 of an H100's peak; norms, activations and rotary embeddings between them take a sixth of
    # a layer's time. The overhead is about 30 kernels of 5 us. NVLink 4 moves 450 GB/s per
    # direction, an adapter of 400 Gb/s 50.
    peak_tflops: float | None = None
    """Peak TFLOPS of one GPU, 989 for an H100 in bf16."""
    utilisation: float = 0.65
    """Share of the peak that layers reach outside of attention's kernels."""
    attention_utilisation: float = 0.35
    """The same of attention's kernels on long samples."""
    head_utilisation: float = 0.65
    """The same of the vocabulary head."""
    layer_overhead_us: float = 150.0
    """Microseconds of a layer's forward on top of its FLOPs: kernel launches."""
    tp_gbs: float = 300.0
    """GB/s of a GPU in tensor-parallel collectives."""
    cp_gbs: float = 300.0
    """GB/s of a GPU in exchanges of keys and values."""
    cp_latency_us: float = 40.0
    """Microseconds of a layer's exchange of keys and values, whatever its bytes."""
    node_gpus: int = 8
    """GPUs of a node."""
    node_gbs: float = 50.0
    """GB/s of a GPU in exchanges of keys and values between nodes."""
    is_measured: bool = False
    """Whether the three shares of the peak were measured."""

    @classmethod
    def of(cls, device: Device, dtype: Dtype, gpu: str = "h100") -> GpuSpeed:
        """The speed that a run assumes: of a kind of GPU, or of one core of a CPU."""
        if device == "cpu":
            return cls(peak_tflops=_CPU_CORE_TFLOPS)
        in_bf16, in_fp32, attention = _GPUS[gpu]
        peak = in_bf16 if dtype == "bf16" else in_fp32
        return cls(peak_tflops=peak, attention_utilisation=attention)

    @property
    def attention_factor(self) -> float:
        """What an operation of attention takes longer than one of a layer's products."""
        return self.utilisation / self.attention_utilisation

    @property
    def basis(self) -> str:
        """What is assumed, one line to print."""
        return (
            f"{'measured' if self.is_measured else 'assumed'}: {self.utilisation:.0%} of "
            f"{self.peak_tflops:g} TFLOPS per GPU, attention {self.attention_utilisation:.0%}, "
            f"head {self.head_utilisation:.0%}; assumed: {self.layer_overhead_us:g} us per layer "
            f"and micro-batch, TP at {self.tp_gbs:g} GB/s, CP and rows over DP ranks at "
            f"{self.cp_gbs:g} GB/s ({self.node_gbs:g} between nodes of {self.node_gpus} GPUs) and "
            f"{self.cp_latency_us:g} us per layer; EP and DP communication is not counted"
        )


def cost_from_sizes(
    sizes: ModelSizes,
    layout: Layout,
    speed: GpuSpeed,
    *,
    mean_length: float,
    stage_layers: StageLayers | None = None,
    **options: Any,
) -> CostModel:
    """Seconds of a micro-batch from a model's sizes. EP and DP communication is not counted. That
    of `layout.cp` is, like that of rows over as many DP ranks.

    Args:
        sizes: also say what each backward runs again: with recompute="full" all of a layer's
            forward, with "selective" the whole MLP or experts if `recompute_modules` has them; the
            other modules cost little. What `freeze` names has no weight gradients.
        mean_length: tokens of a typical sample, for `stage_weights` and sliding windows.
        stage_layers: layers of each chunk; None = equally many.
        options: of the model in place of its own, such as recompute="none".

    Raises:
        ConfigError: a speed that is not set or out of range.
    """
    if options:
        sizes = replace(sizes, **options)
    peak = _checked_peak(speed)
    trained = _trained_share(sizes)
    factor = speed.attention_factor
    kinds = list(sizes.layer_kinds(mean_length=mean_length, attention_factor=factor))
    num_forwards = 1 + _recomputed_share(sizes, kinds, mean_length)
    # Keys of a window cost each token as much; they are no products with weights.
    in_windows = sum(n * kind.layer_attention_tokens(kind.window or 0) for kind, n in kinds)
    products = sum(n * kind.layer_flops_per_token() for kind, n in kinds) - in_windows
    matrices = products / sum(n * kind.layer_cost(mean_length) for kind, n in kinds)
    backward_ratio = 1.0 + num_forwards - (1.0 - trained) * matrices
    # A layer of a hybrid model is half of a transformer layer. Experts launch about as many kernels
    # as a dense layer more: for the router, their tokens' ways and their groups of products.
    num_blocks = sum(n * (len(k.parts) / 2 + bool(k.num_experts)) for k, n in sizes.layer_kinds())
    cost = CostModel.from_model(
        sizes,
        layout=layout,
        flops_per_gpu=peak * 1e12 * speed.utilisation,
        fixed=speed.layer_overhead_us * 1e-6 * num_blocks / layout.num_chunks,
        mean_length=mean_length,
        # Log-probs in chunks: a product in the forward, and three in the backward, which makes the
        # logits again. 4/3 of a head that keeps its logits; with recomputation like the layers.
        head_factor=4 / (1 + backward_ratio) * speed.utilisation / speed.head_utilisation,
        attention_factor=factor,
        stage_layers=stage_layers,
    )
    # TP traffic: a backward moves as many bytes as a forward (twice as many with full
    # recomputation), not backward_ratio times as many. `per_token` makes their sum right.
    tp = layout.tp
    traffic = sum(n * kind.layer_tp_bytes_per_token(tp) for kind, n in sizes.layer_kinds())
    passes = (1 + num_forwards) / (1 + backward_ratio)
    flops = peak * 1e12 * speed.utilisation * tp
    parts, more_parts = (
        sum(n * kind.layer_attention_tokens(tokens) for kind, n in kinds) / flops
        for tokens in (ATTENTION_TOKENS, ATTENTION_TOKENS_PER_RANK)
    )
    exchanged = sum(n * kind.layer_cp_bytes_per_token() for kind, n in kinds) / tp

    def over(num_ranks: int) -> float:
        """Seconds that a token costs more over so many ranks of CP and of the row. Over several
        nodes the ring is as slow as its slowest link."""
        gbs = speed.cp_gbs if tp * num_ranks <= speed.node_gpus else speed.node_gbs
        return (num_ranks - 1) * (more_parts + exchanged / (gbs * 1e9))

    cp = layout.cp
    per_token = cost.per_token + passes * traffic / (speed.tp_gbs * 1e9) + parts + over(cp)
    overheads = [(over(cp * width) - over(cp)) / per_token for width in layout.widths[1:]]
    num_attention = sum(n for kind, n in kinds if kind.layer_cp_bytes_per_token())
    latency = speed.cp_latency_us * 1e-6 * num_attention / layout.num_chunks
    return replace(
        cost,
        fixed=cost.fixed + latency * (layout.cp > 1),
        backward_ratio=backward_ratio,
        per_token=per_token,
        cp_overheads=tuple(overheads) or None,
        square_range=(1.0,) if speed.is_measured else cost.square_range,
        cp_fixed=latency * (cp == 1),
        weight_ratio=trained * PRODUCTS * products / flops / per_token,
    )


def with_image_costs(
    cost: CostModel,
    tower: TowerSizes,
    layout: Layout,
    speed: GpuSpeed,
    *,
    trained: bool,
    recompute: bool,
) -> CostModel:
    """The cost model with seconds of images that a tower encodes.

    Args:
        recompute: the tower's backward runs its blocks again.
    """
    peak = _checked_peak(speed) * 1e12
    speeds = peak * speed.utilisation, peak * speed.attention_utilisation
    per_patch, per_patch_sq = tower.coefficients(*speeds)
    gbs = speed.cp_gbs if layout.world_size <= speed.node_gpus else speed.node_gbs
    read = tower.feature_bytes(1, tower.num_levels, is_trained=False)
    return replace(
        cost,
        per_patch=per_patch,
        per_patch_sq=per_patch_sq,
        per_image_token=read / (gbs * 1e9) if layout.world_size > 1 else 0.0,
        tower_ratio=2.0 + recompute if trained else 0.0,
    )


def _trained_share(sizes: ModelSizes) -> float:
    """The share of the layers' weights, of experts those that a token meets, that are trained."""
    if not sizes.freeze:
        return 1.0
    met = sizes.moe_top_k / (sizes.num_experts or 1)
    shares = [0.0, 0.0]
    for layer in range(sizes.num_layers):
        for kind, _ in sizes.layer_kinds(layer, 1):
            for i, globs in enumerate(((), sizes.freeze)):
                counts = kind.layer_parameters(layer, globs)
                shares[i] += counts.split + counts.whole + met * counts.experts
    return shares[1] / shares[0]


def _recomputed_share(
    sizes: ModelSizes, kinds: list[tuple[LayerKind, int]], mean_length: float
) -> float:
    """The share of the layers' forward that their backward runs again."""
    if sizes.recompute == "full":
        return 1.0
    if sizes.recompute == "none":
        return 0.0
    again = sum(
        n * kind.mlp_flops_per_token()
        for kind, n in kinds
        if ("moe" if kind.num_experts else "mlp") in sizes.recompute_modules
    )
    return again / sum(n * kind.layer_cost(mean_length) for kind, n in kinds)


def _checked_peak(speed: GpuSpeed) -> float:
    shares = ("utilisation", "attention_utilisation", "head_utilisation")
    for name in ("peak_tflops", *shares, "tp_gbs", "cp_gbs", "node_gbs"):
        own, most = getattr(speed, name) or 0.0, 1.0 if name in shares else math.inf
        if not 0 < own <= most:
            flag = f"--{name.replace('_', '-')}={own:g}"
            raise ConfigError(f"{flag}; set a number above 0" + " and at most 1" * (most == 1))
    return float(speed.peak_tflops or 0.0)
