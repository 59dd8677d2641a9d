"""The vocabulary projection deferred for one forward, and restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megapack.errors import ConfigError, ScheduleError
from megapack.model.head import DeferredHead, deferred_head, find_output_layer

pytestmark = pytest.mark.unit


class Projection(torch.nn.Module):
    """Has the call signature of Megatron's column-parallel output layer."""

    def __init__(self, *, bias: bool = False, own_weight: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(7, 4)) if own_weight else None
        self.bias = torch.nn.Parameter(torch.zeros(7)) if bias else None

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        return hidden @ (self.weight if weight is None else weight).t(), None


class Model(torch.nn.Module):
    """Projects its input by `output_layer`."""

    def __init__(self, output_layer: Projection | None = None, tied: Tensor | None = None) -> None:
        super().__init__()
        self.output_layer = output_layer
        self.tied = tied

    def forward(self, hidden: Tensor) -> Tensor:
        assert self.output_layer is not None
        out, _ = self.output_layer(hidden, weight=self.tied, runtime_gather_output=None)
        return out  # type: ignore[no-any-return]


class Wrapper(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: Tensor) -> Tensor:
        return self.module(hidden)  # type: ignore[no-any-return]


HIDDEN = torch.randn(5, 1, 4)


def test_within_the_block_the_model_returns_hidden_states() -> None:
    model = Model(Projection())
    assert model.output_layer is not None
    logits = model(HIDDEN)
    with deferred_head(model) as head:
        assert model(HIDDEN) is HIDDEN
    assert head.weight_VH is model.output_layer.weight
    assert not head.tied
    assert torch.equal(model(HIDDEN), logits)


def test_the_head_of_a_tied_model_is_its_embedding() -> None:
    tied = torch.randn(7, 4)
    model = Model(Projection(own_weight=False), tied)
    with deferred_head(model) as head:
        model(HIDDEN)
    assert head.weight_VH is tied
    assert head.tied


def test_the_head_is_found_inside_wrappers() -> None:
    model = Model(Projection())
    wrapped = Wrapper(Wrapper(model))
    assert find_output_layer(wrapped) is model.output_layer
    with deferred_head(wrapped):
        assert wrapped(HIDDEN) is HIDDEN


def test_an_error_in_the_block_restores_the_projection() -> None:
    model = Model(Projection())
    with pytest.raises(ZeroDivisionError), deferred_head(model):
        raise ZeroDivisionError
    assert model(HIDDEN).shape == (5, 1, 7)


def test_a_patched_forward_is_restored() -> None:
    model = Model(Projection())
    assert model.output_layer is not None
    patched = lambda hidden, **_: (hidden * 2, None)  # noqa: E731
    model.output_layer.forward = patched  # type: ignore[method-assign]
    with deferred_head(model):
        assert model(HIDDEN) is HIDDEN
    assert model.output_layer.forward is patched
    assert torch.equal(model(HIDDEN), HIDDEN * 2)


def test_a_head_that_was_not_reached_has_no_weight() -> None:
    with pytest.raises(ScheduleError, match="was not reached, or has no weight"):
        _ = DeferredHead(Projection(own_weight=False)).weight_VH


def test_a_chunk_without_output_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="Model has no output_layer"):
        find_output_layer(Wrapper(Model()))
    with pytest.raises(ConfigError, match="Linear has no output_layer"):
        find_output_layer(torch.nn.Linear(2, 2))


def test_an_output_layer_with_a_bias_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="has a bias"),
        deferred_head(Model(Projection(bias=True))),
    ):
        pass
