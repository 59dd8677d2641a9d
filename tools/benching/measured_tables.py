"""What attention, matrices and exchanges took on H100s and an H200: tables of a second judge.

`tools/benching/measured_seconds.py` interpolates them.
"""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Floats

HEADS = (64, 32, 16, 8)
RANKS = (1, 2, 4, 8)


def _by_length(text: str) -> tuple[Floats, Floats]:
    """Tokens float64 [lengths], and seconds float64 [lengths, heads, ranks]."""
    lines = [line.replace(":", "").split() for line in text.strip().splitlines()]
    numbers = np.array(lines, dtype=np.float64)
    return numbers[:, 0], 1e-6 * numbers[:, 1:].reshape(-1, len(HEADS), len(RANKS))


# Microseconds of attention's forward for one document on an H100: lines by its tokens; in a line
# four numbers, for 1, 2, 4 and 8 context-parallel ranks, of each of 64, 32, 16 and 8 heads of 128
# channels. vllm-flash-attn, by DistCA. Of documents that fill a row of 131,072 tokens:
# https://github.com/hao-ai-lab/DistCA, distca/profiling/modal-scripts/compute-attn-H100.0.psv
PACKED = _by_length("""
32: 1.4 1.34 1.32 1.3 0.712 0.681 0.662 0.662 0.364 0.349 0.342 0.337 0.189 0.179 0.176 0.175
64: 1.71 1.45 1.38 1.33 0.86 0.738 0.707 0.684 0.441 0.39 0.364 0.356 0.234 0.204 0.195 0.191
128: 2.65 2.3 2.21 2.17 1.36 1.18 1.14 1.11 0.707 0.618 0.597 0.584 0.385 0.339 0.326 0.32
256: 7.26 3.65 3.26 3.18 3.69 1.86 1.69 1.65 2.08 0.999 0.907 0.878 1.02 0.56 0.533 0.496
512: 21.3 11 5.42 4.93 10.4 5.64 2.78 2.58 5.29 2.93 1.5 1.39 2.8 1.59 0.874 0.813
1024: 64.4 30.6 15.7 8.18 30.1 15.5 8.12 4.31 15.4 8.08 4.31 2.4 8.01 4.33 2.46 1.4
2048: 220 111 55.2 27.2 109 54.1 27.1 14 53.4 27.2 14.2 7.68 27 14.2 7.7 4.41
4096: 815 410 207 103 407 205 98.3 50.8 205 99.5 51.1 26.7 101 51.7 27.2 14.6
8192: 3196 1557 790 393 1555 789 391 194 789 394 192 99 389 197 101 52.8
16384: 12257 6231 3055 1541 6248 3050 1538 764 3061 1547 783 383 1551 776 390 202
32768: 48762 24406 12378 6077 24355 12356 6061 3065 12530 6060 3084 1537 6093 3091 1555 785
65536: 198e3 98873 49148 24879 98607 49338 24904 12223 49615 25087 12308 6134 25264 12416 6263 3105
""")
# Of a document alone, which does not fill the GPU if it is short:
# https://github.com/hao-ai-lab/DistCA, distca/profiling/data/compute-attn-H100.csv
ALONE = _by_length("""
64: 28.4 20.9 23.2 25.4 26.8 19.1 20.7 23.1 25.9 18.4 20.6 21.1 25.5 17.8 19.4 21.8
128: 30.4 26.2 27.1 27.6 26.9 27.1 25.7 25.5 25.4 23.4 23.3 19.7 24.1 22.8 22 22.7
256: 36.6 26.1 25.4 26.5 30.2 22.9 22.2 24.2 27 20.7 21.5 21.3 25.7 19.7 19.3 19.5
512: 61.3 41.2 37.2 35 37.8 26.6 25.2 25.9 31.6 22.2 23.2 24.8 28.1 21.1 21.6 21.7
1024: 133 83.2 64 59.5 69.1 46.9 37.7 37 41.8 30 27.4 27.1 33 25.6 23.3 26
2048: 355 206 139 111 180 106 77.3 62.7 92.9 59.4 46.1 40.9 52.4 38 31.7 30
4096: 1055 587 363 255 543 300 189 137 276 157 104 82.3 147 98.2 61.5 50.1
8192: 3707 1894 1081 685 1801 966 558 356 926 503 295 193 481 269 159 117
16384: 13503 6851 3617 2103 6610 3437 1858 1084 3326 1761 968 566 1767 937 516 302
32768: 51894 26340 13502 7182 26234 13056 6713 3655 12861 6648 3463 1898 6600 3495 1835 997
65536: 206e3 103e3 51688 25728 104e3 52084 25991 12836 52472 26171 12950 6614 26130 13395 6779 3409
""")

# Backward over forward by tokens of a sample: TFLOP/s of FlashAttention-2's forward and backward on
# an H100, heads of 128 channels; a backward has 2.5 times the operations. Figures 5 and 6 of
# https://arxiv.org/abs/2407.08608
BACKWARD_TOKENS = 512.0 * 2.0 ** np.arange(6)
_FORWARD, _BACKWARD = (309, 350, 362, 368, 370, 370), (214, 260, 291, 310, 318, 322)
BACKWARD_RATIOS = 2.5 * np.array(_FORWARD) / np.array(_BACKWARD)

# Microseconds per token of a product with a matrix of 2,560 x 9,728, forward and backward, by
# tokens of the row, on an H200: docs/measured/attention_kernels.md
MATRIX_FLOPS = 2.0 * 2560 * 9728
MATRIX_TOKENS = np.array([256.0, 1024, 4096, 8192])
MATRIX_SECONDS = 1e-6 * MATRIX_TOKENS * np.array([0.33, 0.21, 0.19, 0.18])

# Microseconds of NCCL's collectives on 2, 4 and 8 H100s of a node, for 8 MiB to 8 GiB in powers of
# two (in an all-gather what each rank has at the end, in a reduce-scatter at the beginning):
# https://github.com/hao-ai-lab/DistCA, distca/profiling/data/network-prof-nccl/nccl_perf.csv
COLLECTIVE_BYTES = 2.0 ** np.arange(23, 34)
GATHER_US = {
    2: [36, 48, 74, 122, 236, 410, 785, 1529, 3034, 5945, 11821],
    4: [56, 59, 106, 167, 306, 582, 1130, 2222, 4418, 8789, 17515],
    8: [76, 88, 124, 207, 355, 676, 1315, 2589, 5148, 10258, 20442],
}
SCATTER_US = {
    2: [47, 69, 98, 169, 311, 591, 1109, 2034, 3919, 7608, 15253],
    4: [57, 70, 106, 216, 355, 676, 1303, 2510, 4842, 9519, 18536],
    8: [92, 93, 116, 204, 381, 721, 1401, 2740, 5394, 10639, 20969],
}
# Bytes per second that a GPU receives through its own adapter between nodes (NDR InfiniBand):
# https://github.com/NVIDIA/nccl-tests/issues/290
NODE_BYTES_PER_SECOND = 48e9
NODE_GPUS = 8
# The same for tokens on their way to experts and back, on 8 GPUs of a node (H800):
# https://github.com/deepseek-ai/DeepEP, docs/legacy.md
DISPATCH_BYTES_PER_SECOND, COMBINE_BYTES_PER_SECOND = 153e9, 158e9
