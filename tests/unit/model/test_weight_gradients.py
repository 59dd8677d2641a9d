"""Weight gradients that are computed later: sums, memory, and models that cannot."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from torch import Tensor

from megapack.errors import ConfigError, ScheduleError
from megapack.model import weight_gradients
from megapack.model.weight_gradients import WeightGradients
from tests.dist.schedule.delayed_linear import DelayedLinear

pytestmark = pytest.mark.unit

# Its size is all that is read.
GROUP = SimpleNamespace(size=lambda: 1)


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, fused: bool = False, **_: Any
) -> Tensor:
    """Megatron's product on one rank."""
    return linear_with_grad_accumulation_and_async_allreduce(  # type: ignore[no-any-return]
        input,
        weight,
        bias,
        gradient_accumulation_fusion=fused,
        allreduce_dgrad=False,
        sequence_parallel=False,
        tp_group=GROUP,
    )


class Model(torch.nn.Module):
    """Two linear layers around a norm; the first one is used twice."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = torch.nn.Parameter(torch.randn(6, 6, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(6, generator=generator))
        self.norm = torch.nn.LayerNorm(6)
        self.last = torch.nn.Parameter(torch.randn(4, 6, generator=generator))
        self.fused = fused

    def forward(self, input: Tensor) -> Tensor:
        hidden = linear(input, self.first, self.bias, fused=self.fused)
        hidden = linear(self.norm(hidden), self.first, fused=self.fused)
        return linear(hidden.tanh(), self.last, fused=self.fused)


def inputs(count: int = 3) -> list[Tensor]:
    """Inputs of micro-batches of different length, [tokens, 1, hidden]."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(7 + k, 1, 6, generator=generator) for k in range(count)]


def backward(model: Model, input: Tensor) -> None:
    model(input).square().sum().backward()


def joint_gradients(**options: Any) -> list[Tensor]:
    model = Model(**options)
    for input in inputs():
        backward(model, input)
    return [param.grad for param in model.parameters() if param.grad is not None]


def test_sums_have_the_bits_of_joint_backwards() -> None:
    model = Model()
    later = WeightGradients([model])
    for k, input in enumerate(inputs()):
        with later.deferring(0, k):
            backward(model, input)
    assert model.first.grad is None
    assert model.last.grad is None
    assert model.bias.grad is not None, "biases are not put off"
    for k in range(3):
        later.run(0, k)
    wanted = joint_gradients()
    assert len(wanted) == 5
    for param, gradient in zip(model.parameters(), wanted, strict=True):
        assert param.grad is not None
        assert param.grad.equal(gradient)


def test_backwards_outside_of_the_block_are_joint() -> None:
    model = Model()
    later = WeightGradients([model])
    first, second, third = inputs()
    backward(model, first)
    with later.deferring(0, 1):
        backward(model, second)
    later.run(0, 1)
    backward(model, third)
    later.finish_joint(0)
    for param, gradient in zip(model.parameters(), joint_gradients(), strict=True):
        assert param.grad is not None
        assert param.grad.equal(gradient)


def test_an_error_in_a_backward_restores_megatrons() -> None:
    function = megatron_layers.LinearWithGradAccumulationAndAsyncCommunication
    before = vars(function)["backward"]
    later = WeightGradients([Model()])
    with pytest.raises(ZeroDivisionError), later.deferring(0, 0):
        raise ZeroDivisionError
    assert vars(function)["backward"] is before
    with pytest.raises(ScheduleError, match="no weight gradients of micro-batch 0 and chunk 0"):
        later.run(0, 0)


def test_what_was_kept_is_freed() -> None:
    model = Model()
    later = WeightGradients([model])
    kept = watch_kept(model, later)
    assert all(tensor() is not None for tensor in kept)
    later.run(0, 0)
    gc.collect()
    assert [tensor() for tensor in kept] == [None] * len(kept)


def test_a_failed_step_is_forgotten() -> None:
    model = Model()
    later = WeightGradients([model])
    kept = watch_kept(model, later)
    later.drop()
    gc.collect()
    assert [tensor() for tensor in kept] == [None] * len(kept)
    assert model.last.grad is None


def watch_kept(model: Model, later: WeightGradients) -> list[Callable[[], Any]]:
    """Run a backward, and return references to the storages that were kept for its weights."""
    seen: list[Callable[[], Any]] = []

    def watch(tensor: Tensor) -> Tensor:
        seen.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    hidden = linear(inputs()[0], model.first)
    with later.deferring(0, 0):
        # The saved input of the last product, which only its weight gradient needs.
        middle = hidden.tanh()
        watch(middle)
        loss = linear(middle, model.last).square().sum()
        del middle
        loss.backward()
    del hidden, loss
    gc.collect()
    return seen


class Held:
    """An object."""


class Holder(torch.autograd.Function):
    """The identity; its node of the graph holds an object."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, held: Any) -> Tensor:
        ctx.held = held
        return input.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def test_the_graph_is_not_kept() -> None:
    model = Model()
    later = WeightGradients([model])
    held = Held()
    of_graph = weakref.ref(held)
    with later.deferring(0, 0):
        hidden = Holder.apply(model.norm(inputs()[0]), held)
        linear(hidden, model.last).square().sum().backward()
    del hidden, held
    gc.collect()
    assert of_graph() is None


def test_fused_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def accumulate(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(grad_output.t() @ input)

    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    monkeypatch.setattr(megatron_layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
    sums = []
    for splits in (False, True):
        model = Model(fused=True)
        for weight in (model.first, model.last):
            weight.main_grad = torch.zeros_like(weight)  # type: ignore[assignment]
        later = WeightGradients([model])
        for k, input in enumerate(inputs()):
            if not splits:
                backward(model, input)
                continue
            with later.deferring(0, k):
                backward(model, input)
            assert not model.last.main_grad.any() or k, "added in the backward"
        for k in range(3 * splits):
            later.run(0, k)
        sums.append([model.first.main_grad, model.last.main_grad, model.bias.grad])
    assert all(one.equal(two) for one, two in zip(*sums, strict=True))


@pytest.mark.parametrize("kind", ["hook", "computed", "frozen"])
def test_weights_that_cannot_wait_are_in_the_backward(kind: str) -> None:
    model = Model()
    later = WeightGradients([model])
    weight: Tensor = model.last
    calls = []
    if kind == "hook":
        model.last.register_hook(calls.append)
    if kind == "computed":
        weight = model.last * 2
    if kind == "frozen":
        model.last.requires_grad = False
    input = inputs()[0].requires_grad_()
    with later.deferring(0, 0):
        linear(input, weight).sum().backward()
    assert (model.last.grad is None) == (kind == "frozen")
    assert len(calls) == (kind == "hook")
    assert input.grad is not None


@dataclasses.dataclass
class Config:
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False


class Attention(torch.nn.Module):
    """Transformer Engine's attention has a store and nothing to put off."""

    wgrad_store = None


def te_model(config: Config) -> torch.nn.Module:
    return torch.nn.Sequential(DelayedLinear(4, 4, config=config, bias=False), Attention())


def test_models_that_cannot_put_off() -> None:
    plain = Config()
    weight_gradients.check([Model()], plain)
    with pytest.raises(ConfigError, match=r"overlap_moe_expert_parallel_comm=True .* set it to"):
        weight_gradients.check([], Config(overlap_moe_expert_parallel_comm=True))
    with pytest.raises(ConfigError, match=r"DelayedLinear was built without delay_wgrad_compute"):
        weight_gradients.check([te_model(plain)], plain)
    delaying = Config(delay_wgrad_compute=True)
    model = te_model(delaying)
    with pytest.raises(ConfigError, match=r"DDP does not add the weight gradients that Delayed"):
        weight_gradients.check([model], delaying)
    model[0].register_wgrad_accumulation_and_reduce_hooks(print)  # type: ignore[index]
    weight_gradients.check([model], delaying)
    del model[0].weight.skip_backward_post_hook  # type: ignore[index, union-attr]
    with pytest.raises(ConfigError, match=r"of weight, .* use_cpu_initialization=True replaces"):
        weight_gradients.check([model], delaying)


def test_megatrons_schedules_would_lose_what_is_put_off() -> None:
    weight_gradients.check_none_puts_off([Model(), te_model(Config())])
    with pytest.raises(ConfigError, match="Megatron's schedules never compute the weight"):
        weight_gradients.check_none_puts_off([te_model(Config(delay_wgrad_compute=True))])
