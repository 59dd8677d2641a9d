"""Weight gradients of linear layers that are computed later than the rest of a backward.

The backward of a layer `y = x W^T` has two parts. The input gradient `dy W` is what the layer
before waits for. The weight gradient `dy^T x` can wait until the stage has nothing else to do. In
between `x` and `dy` are kept.

- Megatron's own layers: their backward keeps both, by the path on which Megatron puts off the
  gradient of the embedding. With sequence parallelism the weight gradient gathers `x` again, so all
  tensor-parallel ranks must run weight gradients in one order.
- Transformer Engine's layers keep them themselves, if they are built with `delay_wgrad_compute`.
- Norms, embeddings, biases, routers, gates and the head are not put off: their gradients are in the
  backward, since they are small, or since log-probs need the head's logits at once.

A gradient is added to DDP's `main_grad`, or to `grad` without DDP, when it is computed. If the
weight gradients of micro-batches are computed in the order of their backwards, sums of fp32 have
the bits of backwards that are not split.

DDP does not learn when a gradient that was put off is ready. All of this must run within DDP's
`no_sync`, and the reduction is started after a chunk's last weight gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute
from torch import Tensor

from megapack.errors import ConfigError, ScheduleError
from megapack.model.overlap import not_counting
from megapack.model.parameters import has_hooks
from megapack.model.replaced import replaced


class WeightGradients:
    """The weight gradients of a rank's chunks that were put off.

    Args:
        chunks: the rank's model chunks, wrapped in DDP or not.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        self._delaying = [_delaying_layers(chunk) for chunk in chunks]
        self._kept: dict[tuple[int, int], _Kept] = {}

    @property
    def puts_off_always(self) -> bool:
        """Whether some weight gradients come after their backward even outside of `deferring`."""
        return any(self._delaying)

    @contextlib.contextmanager
    def deferring(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Within the block, a backward leaves the weight gradients of linear layers to `run`.

        Args:
            chunk: the chunk of the stage.
            microbatch: the micro-batch whose backward runs in the block.
        """
        products: list[_Product] = []
        with not_counting([self._chunks[chunk]]), _keeping(products):
            yield
        delayed = _take_delayed(self._delaying[chunk])
        self._kept[chunk, microbatch] = _Kept(products, delayed)

    def run(self, chunk: int, microbatch: int) -> None:
        """Add the weight gradients that a backward has left, and free what was kept for them.

        Raises:
            ScheduleError: no backward of this micro-batch through this chunk ran in `deferring`.
        """
        kept = self._kept.pop((chunk, microbatch), None)
        if kept is None:
            raise ScheduleError(
                f"no weight gradients of micro-batch {microbatch} and chunk {chunk} were put off"
            )
        with torch.no_grad(), not_counting([self._chunks[chunk]]):
            kept.add()

    def finish_joint(self, chunk: int) -> None:
        """Add what layers put off in a backward outside of `deferring`; call it after each.

        Transformer Engine's layers that are built with `delay_wgrad_compute` put off always.
        """
        with torch.no_grad(), not_counting([self._chunks[chunk]]):
            _Kept([], _take_delayed(self._delaying[chunk])).add()

    def drop(self) -> None:
        """Forget what was put off, after a step that failed."""
        self._kept.clear()
        for delaying in self._delaying:
            _take_delayed(delaying)


def check(chunks: Sequence[Any], config: Any) -> None:
    """Raise ConfigError if weight gradients would be lost or added twice when they are put off.

    Args:
        chunks: the rank's model chunks, wrapped in DDP or not.
        config: the model's TransformerConfig.
    """
    advice = "or plan.backward=joint (Policy(backward='joint'))"
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise ConfigError(
            "overlap_moe_expert_parallel_comm=True puts off weight gradients itself; set it to "
            f"False, {advice}"
        )
    for layer in (layer for chunk in chunks for layer in chunk.modules()):
        if _has_weight_store(layer) and (fault := _fault(layer)):
            raise ConfigError(f"{fault}, {advice}")


def _fault(layer: Any) -> str:
    """Why a layer of Transformer Engine loses what it puts off, or adds it twice; "" if it does
    not."""
    name = type(layer).__name__
    if not _puts_off(layer):
        return (
            f"{name} was built without delay_wgrad_compute, so its weight gradients cannot wait; "
            "build the model with build_model(splits_backward=True), or set "
            "delay_wgrad_compute=True in its config and in DDP's before they are used"
        )
    # Of a layer with a fused norm, the norm's gradients are in the backward.
    for param_name, param in layer.named_parameters(recurse=False):
        if param_name.startswith(("weight", "bias")) and not _waits(param):
            return (
                f"{name} puts off gradients of {param_name}, which DDP would add a micro-batch "
                "late: use_cpu_initialization=True replaces the parameter that says so; set it to "
                "False"
            )
    waiting = [param for param in _waiting_params(layer) if param.requires_grad]
    if len(layer.wgrad_accumulation_and_reduce_hooks) < len(waiting):
        return (
            f"DDP does not add the weight gradients that {name} puts off; set "
            "DistributedDataParallelConfig(delay_wgrad_compute=True)"
        )
    return ""


def check_none_puts_off(chunks: Sequence[Any]) -> None:
    """Raise ConfigError if a schedule of Megatron would lose weight gradients of these chunks."""
    for chunk in chunks:
        for layer in _delaying_layers(chunk):
            raise ConfigError(
                f"{type(layer).__name__} was built with delay_wgrad_compute, and Megatron's "
                "schedules never compute the weight gradients that it puts off; set "
                "ScheduleAdapter(executor='operations'), or delay_wgrad_compute=False"
            )


class _Product(NamedTuple):
    """A weight gradient of one of Megatron's layers, not computed yet."""

    weight: torch.nn.Parameter
    input: Tensor
    """[tokens, ..., in]; this rank's part of the tokens with sequence parallelism."""
    grad_output: Tensor
    """[tokens, ..., out]"""
    gathers_over: Any
    """The group whose ranks have the other parts of `input`; None if it is whole."""
    is_fused: bool
    """The kernel adds to `main_grad` itself (gradient_accumulation_fusion)."""


class _Delayed(NamedTuple):
    """A weight gradient that a layer of Transformer Engine has put off."""

    layer: Any
    work: Any
    """The entry of the layer's queue."""
    early: list[tuple[torch.nn.Parameter, Tensor]]
    """Gradients that came in the backward, of biases, and wait for the layer's hooks."""


class _Kept(NamedTuple):
    """What one backward through a chunk has put off."""

    products: list[_Product]
    delayed: list[_Delayed]

    def add(self) -> None:
        """Compute the gradients and add them; frees what each needed as soon as it is done."""
        while self.delayed:
            _run_delayed(self.delayed.pop(0))
        uses: dict[int, list[_Product]] = {}
        while self.products:
            uses.setdefault(id(self.products[0].weight), []).append(self.products.pop(0))
        while uses:
            _add_products(uses.pop(next(iter(uses))))


@contextlib.contextmanager
def _keeping(products: list[_Product]) -> Iterator[None]:
    """Within the block, backwards of Megatron's linear layers append to `products`."""
    linear = megatron_layers.LinearWithGradAccumulationAndAsyncCommunication
    joint = linear.backward

    def backward(ctx: Any, grad_output: Tensor) -> Any:
        weight = ctx.saved_tensors[1]
        if not _can_wait(ctx, weight):
            return joint(ctx, grad_output)
        return _input_gradients(joint, ctx, grad_output, products)

    with replaced(linear, backward=staticmethod(backward)):
        yield


def _can_wait(ctx: Any, weight: Tensor) -> bool:
    """Whether the gradient of this use of a weight can be added outside of the backward.

    Not if the engine must see it: a weight computed from others, or one with hooks. Not under
    autocast, nor where Megatron has its own way to add it.
    """
    is_special = (
        ctx.grad_output_buffer is not None
        or getattr(ctx, "gtp_remat_size", 1) > 1
        or hasattr(weight, "__fsdp_param__")
        or ctx._fwd_used_autocast
    )
    return weight.is_leaf and weight.requires_grad and not has_hooks(weight) and not is_special


def _input_gradients(
    joint: Callable[..., Any], ctx: Any, grad_output: Tensor, products: list[_Product]
) -> Any:
    """What `joint` returns without the weight gradient, which is appended to `products`."""
    input, weight = ctx.saved_tensors
    product = _Product(
        weight=weight,
        # Without its history, which would keep the graph of the whole forward.
        input=input.detach(),
        grad_output=grad_output.detach(),
        gathers_over=ctx.tp_group if ctx.sequence_parallel else None,
        is_fused=ctx.gradient_accumulation_fusion,
    )
    products.append(product)
    grad_input, _, _, *rest = joint(_WithoutWeight(ctx, input, weight), grad_output)
    # Megatron sums the bias gradient of the path below over the wrong dimensions.
    grad_bias = grad_output.contiguous().flatten(0, -2).sum(dim=0) if ctx.use_bias else None
    return (grad_input, None, grad_bias, *rest)


class _WithoutWeight:
    """A layer's context with which Megatron's backward leaves out the weight gradient.

    That path is meant for the embedding (`defer_embedding_wgrad_compute`): with a buffer for output
    gradients, and with fusion, as it would otherwise multiply an input that it did not gather.
    """

    use_bias = False
    gradient_accumulation_fusion = True
    main_grad = None
    wgrad_deferral_limit = 0

    def __init__(self, ctx: Any, input: Tensor, weight: Tensor) -> None:
        self._ctx = ctx
        # Another object than the parameter: the backward writes `main_grad` to it, and would make a
        # gradient without content for a weight with the attributes that DDP sets. It requires a
        # gradient as the parameter does: torch multiplies by another kernel otherwise.
        self.saved_tensors = input, weight.detach().requires_grad_()
        self.grad_output_buffer: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _add_products(products: list[_Product]) -> None:
    """Add the gradients of one weight, which a forward may use several times.

    As in autograd, the uses are summed first.
    """
    weight = products[0].weight
    total: Tensor | None = None
    while products:
        product = products.pop(0)
        grad_output, input = prepare_input_tensors_for_wgrad_compute(
            product.grad_output, _whole_input(product)
        )
        if product.is_fused:
            _add_fused(weight, grad_output, input)
            continue
        gradient = grad_output.t().matmul(input)
        total = gradient if total is None else total + gradient
    if total is None:
        return
    if hasattr(weight, "main_grad"):
        weight.main_grad.add_(total)
    elif weight.grad is None:
        weight.grad = total
    else:
        weight.grad.add_(total)


def _whole_input(product: _Product) -> Tensor:
    """The input of all tokens; a collective of the tensor-parallel ranks if they share them."""
    if product.gathers_over is None:
        return product.input
    size = list(product.input.size())
    size[0] *= product.gathers_over.size()
    whole = get_global_memory_buffer().get_tensor(size, product.input.dtype, "mpu")
    megatron_layers.dist_all_gather_func(whole, product.input, group=product.gathers_over)
    return whole  # type: ignore[no-any-return]


def _add_fused(weight: Any, grad_output: Tensor, input: Tensor) -> None:
    kernels = megatron_layers.fused_weight_gradient_mlp_cuda
    if weight.main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(input, grad_output, weight.main_grad)
    else:
        kernels.wgrad_gemm_accum_fp16(input, grad_output, weight.main_grad)


def _delaying_layers(chunk: Any) -> list[Any]:
    """Transformer Engine's layers that put off their weight gradients."""
    return [layer for layer in chunk.modules() if _has_weight_store(layer) and _puts_off(layer)]


def _puts_off(layer: Any) -> bool:
    return bool(layer.wgrad_store.delay_wgrad_compute())


def _has_weight_store(layer: Any) -> bool:
    """Whether a module is a trained linear layer of Transformer Engine; it may put gradients off.

    From Transformer Engine 2.11 on, its modules without weights have the attribute, too: None. A
    layer whose weights are frozen, as under adapters, has no weight gradients.
    """
    if getattr(layer, "wgrad_store", None) is None:
        return False
    params = layer.named_parameters(recurse=False)
    return any(param.requires_grad for name, param in params if name.startswith("weight"))


def _waiting_params(layer: Any) -> list[Any]:
    """A layer's parameters whose gradients DDP adds after `backward_dw`."""
    return [param for param in layer.parameters(recurse=False) if _waits(param)]


def _waits(param: Any) -> bool:
    return bool(getattr(param, "skip_backward_post_hook", False))


def _take_delayed(delaying: Sequence[Any]) -> list[_Delayed]:
    """Take from the layers' queues what they have put off.

    A queue is first in, first out, and the next backward would add to it: gradients could then
    only be computed in the order of the backwards.
    """
    taken: list[_Delayed] = []
    for layer in delaying:
        early = []
        for param in _waiting_params(layer):
            # With fusion a gradient without content, as large as the weight.
            if param.grad is not None and not param.grad_added_to_main_grad:
                early.append((param, param.grad))
            param.grad = None
        queue = layer.wgrad_store.context
        while queue.qsize():
            taken.append(_Delayed(layer, queue.get(), early))
            early = []
    return taken


def _run_delayed(delayed: _Delayed) -> None:
    for param, grad in delayed.early:
        param.grad = grad
    delayed.layer.wgrad_store.context.put(delayed.work)
    delayed.layer.backward_dw()
