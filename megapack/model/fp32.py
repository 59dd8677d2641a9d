"""Parameters that stay in fp32 in a bf16 model."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor


def mark_fp32(*parameters: Tensor) -> None:
    """Make parameters fp32, and mark them to stay so: see `in_bf16`.

    The mark is that of Megatron-Core's main branch, whose `Float16Module` leaves such parameters.
    """
    for parameter in parameters:
        parameter.data = parameter.data.float()
        vars(parameter)["keep_in_fp32"] = True


def in_bf16(config: TransformerConfig, chunk: torch.nn.Module) -> torch.nn.Module:
    """A chunk in Megatron's Float16Module, whose marked parameters keep their values in fp32.

    Megatron-Core 0.16 to 0.19 cast all parameters.
    """
    marked = [param for param in chunk.parameters() if getattr(param, "keep_in_fp32", False)]
    values = [param.data for param in marked]
    half = Float16Module(config, chunk)
    for param, own in zip(marked, values, strict=True):
        param.data = own
    return half  # type: ignore[no-any-return]
