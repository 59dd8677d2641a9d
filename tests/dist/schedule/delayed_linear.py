"""Linear layers with the contract of Transformer Engine's about weight gradients that are put off.

Written from module/_common.py, base.py and linear.py of Transformer Engine 2.7 to 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from megapack.job.gpt import specs


class WeightGradStore:
    """Transformer Engine's: a queue of products to compute later, first in, first out."""

    def __init__(self, delay_wgrad_compute: bool) -> None:
        self.context: Any = queue.Queue() if delay_wgrad_compute else None
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, tensors: list[Tensor], function: Callable[..., Any]) -> None:
        assert self.enabled
        self.context.put([tensors, function])

    def pop(self) -> Any:
        if not self.context.qsize():
            raise RuntimeError("Pop empty queue.")
        tensors, function = self.context.get()
        return function(*tensors), tensors


class _Product(torch.autograd.Function):
    """y = x W^T + b, with the backward of Transformer Engine's `_Linear`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Any, layer: Any) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.layer = layer
        output = input @ weight.t()
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        input, weight = ctx.saved_tensors
        (grad_output,) = grads
        layer = ctx.layer

        def wgrad_gemm(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
            dy_NO = dy.contiguous().flatten(0, -2)
            product = dy_NO.t() @ x.contiguous().flatten(0, -2)
            if layer.fuse_wgrad_accumulation:
                layer.weight.main_grad.add_(product)
            return product, dy_NO.sum(dim=0)

        grad_input = grad_output @ weight
        wgrad, grad_bias = None, None
        if layer.wgrad_store.delay_wgrad_compute():
            if layer.quantizes:
                # In FP8 the sum is a part of the output gradient's quantization.
                grad_bias = grad_output.contiguous().flatten(0, -2).sum(dim=0)
            layer.wgrad_store.put([input, grad_output], wgrad_gemm)
        else:
            wgrad, grad_bias = wgrad_gemm(input, grad_output)
        if layer.fuse_wgrad_accumulation:
            layer.weight.grad_added_to_main_grad = True
            wgrad = torch.full_like(weight, torch.nan)
        return grad_input, wgrad, grad_bias if layer.use_bias else None, None


class DelayedLinear(torch.nn.Module):
    """A linear layer without tensor parallelism that may put off its weight gradients."""

    fuses = False
    """Adds weight gradients to `main_grad` itself (gradient_accumulation_fusion)."""
    quantizes = False
    """Bias gradients come in the backward, as in FP8."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, bias: bool, **_: Any
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self.bias = torch.nn.Parameter(torch.zeros(output_size)) if bias else None
        self.use_bias = bias
        self.fuse_wgrad_accumulation = self.fuses
        self.wgrad_store = WeightGradStore(config.delay_wgrad_compute)
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        if config.delay_wgrad_compute:
            for param in self.parameters():
                param.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        return _Product.apply(input, self.weight, self.bias, self), None

    def backward_dw(self) -> None:
        (wgrad, bgrad), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = wgrad
        if self.bias is not None and self.bias.grad is None:
            assert not self.quantizes, "the bias gradient of the backward was lost"
            self.bias.grad = bgrad
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


class FusedLinear(DelayedLinear):
    fuses = True


class QuantizedLinear(DelayedLinear):
    quantizes = True


LAYERS = {"te": DelayedLinear, "te_fused": FusedLinear, "te_quantized": QuantizedLinear}


@contextlib.contextmanager
def linear_layers(kind: str) -> Iterator[None]:
    """Within the block, models are built with these linear layers; "" for Megatron's."""
    with pytest.MonkeyPatch.context() as patch:
        if kind:
            original = specs.local_layer_spec

            def spec(*args: Any, **kwargs: Any) -> Any:
                layer = original(*args, **kwargs)
                attention = layer.submodules.self_attention.submodules
                mlp = layer.submodules.mlp
                # Megatron-Core 0.19 has a partial function instead of a spec.
                is_partial = isinstance(mlp, functools.partial)
                mlp = mlp.keywords["submodules"] if is_partial else mlp.submodules
                for parts, names in (
                    (attention, ("linear_qkv", "linear_proj")),
                    (mlp, ("linear_fc1", "linear_fc2")),
                ):
                    for name in names:
                        setattr(parts, name, LAYERS[kind])
                return layer

            patch.setattr(specs, "local_layer_spec", spec)
        yield
