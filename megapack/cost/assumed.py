"""A cost model without measurements: the model's operations on a GPU whose speed is assumed.

A plan depends on ratios: attention to matrices, the vocabulary head to a chunk's layers, a
micro-batch's fixed cost to its tokens. The first two follow from sizes; the assumed speed decides
only the third, and the absolute seconds. `tools/calibrate.py` measures all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megapack.base.choices import Device, Dtype
from megapack.cost.model import CostModel
from megapack.cost.sizes import ModelSizes
from megapack.cost.stages import StageLayers
from megapack.errors import ConfigError
from megapack.layout import Layout

# Peaks of an H100 SXM without sparsity, from NVIDIA's data sheet. fp32 does not use tensor cores.
_H100_TFLOPS: dict[Dtype, float] = {"bf16": 989.4, "fp32": 66.9}
# One core with AVX2 at 3 GHz: 2 units * 8 numbers * 2 operations * 3e9 = 96 GFLOPS.
_CPU_CORE_TFLOPS = 0.1
# A kernel of attention takes about as long for a sample as if each of its tokens met so many keys
# more, half of which are operations of a causal sample: short samples do not fill its blocks. Row
# tokens of several ranks meet as many again for each further rank. docs/maintainers/calibration.md
# has what an H200 and an H100 take.
ATTENTION_TOKENS = 600.0
ATTENTION_TOKENS_PER_RANK = 325.0


@dataclass(frozen=True, kw_only=True)
class GpuSpeed:
    """Speed of a GPU, to predict seconds from a model's sizes."""

    # The share of the peak is the lowest that Megatron-LM's README gives for H100: 41 to 48 %. The
    # overhead (about 20 kernels of 5 us) and the bandwidths (NVLink 4 moves 450 GB/s per direction)
    # were chosen by hand. NCCL's all-gather has a latency of 25, 33 and 51 us on 2, 4 and 8 H100s
    # (docs/maintainers/calibration.md).
    peak_tflops: float | None = None
    """Peak TFLOPS of one GPU, 989 for an H100 in bf16."""
    utilisation: float = 0.4
    """Share of the peak that kernels reach."""
    layer_overhead_us: float = 100.0
    """Microseconds of a layer's forward on top of its FLOPs: kernel launches."""
    tp_gbs: float = 300.0
    """GB/s of a GPU in tensor-parallel collectives."""
    cp_gbs: float = 300.0
    """GB/s of a GPU in exchanges of keys and values."""
    cp_latency_us: float = 40.0
    """Microseconds of a layer's exchange of keys and values, whatever its bytes."""

    @classmethod
    def of(cls, device: Device, dtype: Dtype) -> GpuSpeed:
        """The speed that a run assumes: an H100, or one core of a CPU."""
        return cls(peak_tflops=_H100_TFLOPS[dtype] if device == "cuda" else _CPU_CORE_TFLOPS)

    @property
    def basis(self) -> str:
        """What is assumed, one line to print."""
        return (
            f"assumed: {self.utilisation:.0%} of {self.peak_tflops:g} TFLOPS per GPU, "
            f"{self.layer_overhead_us:g} us per layer and micro-batch, TP at {self.tp_gbs:g} GB/s, "
            f"CP and rows over DP ranks at {self.cp_gbs:g} GB/s and {self.cp_latency_us:g} us per "
            "layer; EP and DP communication is not counted"
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
    num_forwards = 1 + _recomputed_share(sizes, mean_length)
    trained = _trained_share(sizes)
    kinds = list(sizes.layer_kinds(mean_length=mean_length))
    matrices = sum(n * kind.layer_flops_per_token() for kind, n in kinds)
    matrices /= sum(n * kind.layer_cost(mean_length) for kind, n in kinds)
    backward_ratio = 1.0 + num_forwards - (1.0 - trained) * matrices
    # A layer of a hybrid model is half of a transformer layer.
    num_blocks = sum(n * len(kind.parts) / 2 for kind, n in sizes.layer_kinds())
    cost = CostModel.from_model(
        sizes,
        layout=layout,
        flops_per_gpu=peak * 1e12 * speed.utilisation,
        fixed=speed.layer_overhead_us * 1e-6 * num_blocks / layout.num_chunks,
        mean_length=mean_length,
        # Log-probs in chunks: a product in the forward, and three in the backward, which makes the
        # logits again. 4/3 of a head that keeps its logits; with recomputation like the layers.
        head_factor=4 / (1 + backward_ratio),
        stage_layers=stage_layers,
    )
    # TP traffic: a backward moves as many bytes as a forward (twice as many with full
    # recomputation), not backward_ratio times as many. `per_token` makes their sum right.
    tp = layout.tp
    traffic = sum(n * kind.layer_tp_bytes_per_token(tp) for kind, n in sizes.layer_kinds())
    passes = (1 + num_forwards) / (1 + backward_ratio)
    flops = peak * 1e12 * speed.utilisation * tp
    parts, more_parts = (
        sum(n * kind.layer_attention_tokens(tokens) for kind, n in sizes.layer_kinds()) / flops
        for tokens in (ATTENTION_TOKENS, ATTENTION_TOKENS_PER_RANK)
    )
    exchanged = sum(n * kind.layer_cp_bytes_per_token() for kind, n in sizes.layer_kinds()) / tp
    per_rank = more_parts + exchanged / (speed.cp_gbs * 1e9)
    per_token = cost.per_token + passes * traffic / (speed.tp_gbs * 1e9) + parts
    # A row over w DP ranks is over cp * w, of which these are the first cp.
    per_token += per_rank * (layout.cp - 1)
    num_attention = sum(n for kind, n in sizes.layer_kinds() if kind.layer_cp_bytes_per_token())
    latency = speed.cp_latency_us * 1e-6 * num_attention / layout.num_chunks
    return replace(
        cost,
        fixed=cost.fixed + latency * (layout.cp > 1),
        backward_ratio=backward_ratio,
        per_token=per_token,
        cp_overhead=per_rank * layout.cp / per_token,
        cp_fixed=latency * (layout.cp == 1),
        weight_ratio=trained,
    )


def _trained_share(sizes: ModelSizes) -> float:
    """The share of the layers' weights, of experts those that a token meets, that are trained."""
    if not sizes.freeze:
        return 1.0
    met = sizes.moe_top_k / (sizes.num_experts or 1)
    shares = [0.0, 0.0]
    for layer in range(sizes.num_stage_layers):
        for kind, _ in sizes.layer_kinds(layer, 1):
            for i, globs in enumerate(((), sizes.freeze)):
                counts = kind.layer_parameters(layer, globs)
                shares[i] += counts.split + counts.whole + met * counts.experts
    return shares[1] / shares[0]


def _recomputed_share(sizes: ModelSizes, mean_length: float) -> float:
    """The share of the layers' forward that their backward runs again."""
    if sizes.recompute == "full":
        return 1.0
    if sizes.recompute == "none":
        return 0.0
    kinds = list(sizes.layer_kinds(mean_length=mean_length))
    again = sum(
        n * kind.mlp_flops_per_token()
        for kind, n in kinds
        if ("moe" if kind.num_experts else "mlp") in sizes.recompute_modules
    )
    return again / sum(n * kind.layer_cost(mean_length) for kind, n in kinds)


def _checked_peak(speed: GpuSpeed) -> float:
    peak = speed.peak_tflops or 0.0
    rates = (peak, speed.utilisation, speed.tp_gbs, speed.cp_gbs)
    if not all(rate > 0 for rate in rates) or speed.utilisation > 1:
        raise ConfigError(
            f"--peak-tflops={peak:g}, --utilisation={speed.utilisation:g}, --tp-gbs="
            f"{speed.tp_gbs:g}, --cp-gbs={speed.cp_gbs:g}; set all above 0, and --utilisation to "
            "at most 1"
        )
    return peak
