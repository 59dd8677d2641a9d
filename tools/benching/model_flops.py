"""Model FLOPs of samples and the peak FLOP/s of a device, for MFU.

The forward of a sample of L tokens, R of them in the response, takes

    layers * (a * L + 2 * heads * width * L^2) + 2 * hidden * vocabulary * R

operations. `a` is twice the number of weights of a layer's matrices (multiply and add). Causal
attention has L^2 / 2 pairs of tokens with two dot products each. Only response positions are
projected to the vocabulary. A forward and backward is three forwards; recomputed layers do not
count. Norms, rotary embeddings, softmax and the embedding lookup are left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from megapack import ModelSizes

# Dense bf16 TFLOP/s of the SXM boards. PCIe and NVL boards have other peaks.
PEAK_BF16_TFLOPS = {"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H200": 989.4}


def peak_flops(device_name: str) -> float | None:
    """The device's peak FLOP/s in bf16; None for an unknown device."""
    tflops = PEAK_BF16_TFLOPS.get(device_name)
    return None if tflops is None else tflops * 1e12


def forward_flops(sizes: ModelSizes, samples: Iterable[tuple[int, int]]) -> float:
    """Operations of the forward of samples, given their (prompt, response) token counts."""
    total = 0.0
    for prompt, response in samples:
        length = prompt + response
        layer = sizes.last_kind.layer_flops_per_token() * length
        layer += sizes.last_kind.layer_flops_per_token_sq() * length**2
        total += sizes.num_layers * layer + sizes.head_flops_per_token() * response
    return total
