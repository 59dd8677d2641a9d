"""Biases that Megatron's local layers return or add in ways that autograd cannot follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP


def repair_biases(chunks: Sequence[Any]) -> None:
    """Let MLPs that are recomputed, and local experts, have biases. Idempotent.

    A recomputed MLP returns a copy of its bias. Megatron's MLPs return the bias of their second
    projection, a parameter, beside their output. What a recomputed function returns becomes an
    output of its node in autograd's graph, also a parameter: the next backward of that parameter
    would be the node's own, which runs the function and its backward again, without end.

    The second projection of a local expert returns a copy of its product. The expert adds its bias
    in place, which autograd refuses where the product is the result of a function of Megatron's
    that returns its input.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if getattr(module, "recompute_mlp", False):
            _hook(module.mlp, _copy_parameters)
        if isinstance(module, SequentialMLP):
            for expert in module.local_experts:
                projection = expert.linear_fc2
                if isinstance(projection, RowParallelLinear) and projection.bias is not None:
                    _hook(projection, _copy_product)


def _hook(module: Any, hook: Any) -> None:
    if hook not in module._forward_hooks.values():
        module.register_forward_hook(hook)


def _copy_parameters(module: Any, inputs: Any, output: Any) -> Any:
    if not isinstance(output, tuple):
        return output
    return tuple(o.clone() if isinstance(o, torch.nn.Parameter) else o for o in output)


def _copy_product(module: Any, inputs: Any, output: tuple[torch.Tensor, Any]) -> Any:
    return output[0].clone(), *output[1:]
