"""Transformer Engine's `make_graphed_callables` on a CPU, where there are no CUDA graphs.

A capture is two passes of a layer on its static inputs, which must be the same operations on the
same addresses (`capture`). A replay is the layer's code once more, on inputs of the captured
shapes. So it shows what can be captured, and that graphs are called, and not that static buffers
keep their values until they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.rehearsal.capture import Capture


def graphed_layers(
    layers: Sequence[Any], static_inputs: Sequence[tuple[Tensor, ...]], **options: Any
) -> tuple[Callable[..., Any], ...]:
    """The graphs of layers, in the order of `static_inputs`: one for each layer.

    Raises:
        KernelFault: Transformer Engine or CUDA would refuse this, or replay something else.
    """
    from megapack.cpu.te.calls import require

    require(len(layers) == len(static_inputs), "only a pipeline of one stage is rehearsed")
    return tuple(_graph(*pair, require) for pair in zip(layers, static_inputs, strict=True))


def _graph(layer: Any, given: tuple[Tensor, ...], require: Callable[[bool, str], None]) -> Any:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks)
    require(not any(hooks), f"layer {layer.layer_number} has hooks, which no graph keeps")
    # Tables and the like are made at the first use: Transformer Engine warms up too.
    _operations(layer, given)
    first, second = (_operations(layer, given) for _ in range(2))
    require(first == second, f"layer {layer.layer_number} runs other operations the second time")
    shapes = [(x.shape, x.dtype) for x in given]

    def replay(*args: Tensor, is_first_microbatch: bool, **kwargs: Any) -> Any:
        require(not kwargs, f"not captured: {', '.join(kwargs)}")
        own = [(x.shape, x.dtype) for x in args]
        require(own == shapes, f"inputs of {own}, captured with {shapes}")
        return layer._te_cuda_graph_capture(*args)

    replay.reset = lambda: None  # type: ignore[attr-defined]
    return replay


def _operations(layer: Any, given: tuple[Tensor, ...]) -> list[Any]:
    with Capture() as captured:
        outputs = [x for x in layer(*given) if x.requires_grad]
        inputs = [*given, *(param for param in layer.parameters() if param.requires_grad)]
        grads = [torch.empty_like(x) for x in outputs]
        torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    return captured.operations
