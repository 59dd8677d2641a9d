"""Enumerations of `transformer_engine_torch`; those of FP8 are read at import."""

from __future__ import annotations

import enum
import functools
from typing import Any

import torch


class DType(enum.IntEnum):
    """Types of elements. `kFloat64` is an addition: errors can then be told from rounding."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10
    kFloat64 = 11


TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.half,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat64: torch.float64,
}


def torch_dtype(dtype: Any) -> torch.dtype:
    """torch's dtype of a `DType`, of its number, or of itself."""
    return dtype if isinstance(dtype, torch.dtype) else TORCH[DType(int(dtype))]


def _numbered(name: str, members: str) -> Any:
    return enum.IntEnum(name, members.split(), start=0)


@functools.cache
def attention_backends(version: tuple[int, ...]) -> Any:
    """Kinds of fused attention; before 2.16 there was one for at most 512 tokens."""
    members = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    if version < (2, 16):
        members["NVTE_F16_max512_seqlen"] = 0
    return enum.IntEnum("NVTE_Fused_Attn_Backend", members)


NVTE_QKV_Format = _numbered(
    "NVTE_QKV_Format",
    "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD NVTE_THD_2SBHD "
    "NVTE_BHSD NVTE_QKV_Format_NOT_SET",
)
NVTE_QKV_Layout = _numbered(
    "NVTE_QKV_Layout",
    "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD "
    "NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD "
    "NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD "
    "NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD "
    "NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD "
    "NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD "
    "NVTE_BHSD_BHSD_BHSD NVTE_QKV_Layout_NOT_SET",
)
NVTE_Bias_Type = _numbered(
    "NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI"
)
NVTE_Mask_Type = _numbered(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
    "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _numbered(
    "NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX"
)
FP8FwdTensors = _numbered(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
)
FP8BwdTensors = _numbered(
    "FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3"
)
NVTEScalingMode = _numbered(
    "NVTEScalingMode",
    "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D "
    "NVTE_BLOCK_SCALING_2D NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING",
)
Float8BlockScaleTensorFormat = _numbered("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT")
CommOverlapType = _numbered("CommOverlapType", "RS AG")
CommOverlapAlgo = _numbered("CommOverlapAlgo", "BULK_OVERLAP_AG BULK_OVERLAP_RS")
NVTERoutingMapFormat = _numbered("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
NVTEQBHistogramMode = _numbered("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")
