"""Routers are checked before a pass; Megatron's own router supports less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from megapack import Layout
from megapack.errors import ConfigError, DataError
from megapack.model.experts.model import ModelRouting
from megapack.model.experts.router import PackedRouter, moe_layers

pytestmark = pytest.mark.unit


def config(**changes: Any) -> SimpleNamespace:
    values = {
        "num_layers": 4,
        "num_moe_experts": 4,
        "moe_layer_freq": 1,
        "moe_router_topk": 2,
        "moe_router_enable_expert_bias": False,
        "moe_router_fusion": False,
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
    }
    return SimpleNamespace(**{**values, **changes})


def routing(kind: type[torch.nn.Module], **changes: Any) -> ModelRouting:
    """Routing of a chunk with one router that is never run."""
    router = kind.__new__(kind)
    torch.nn.Module.__init__(router)
    return ModelRouting([torch.nn.Sequential(router)], config(**changes), Layout(), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_z_loss_coeff": 1e-3},
        {"moe_aux_loss_coeff": [0.0, 0.1]},
        {"moe_router_enable_expert_bias": True},
    ],
)
def test_losses_and_bias_need_the_packed_router(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"set router=megapack\.model\.experts"):
        routing(TopKRouter, **changes)
    routing(TopKRouter)
    routing(PackedRouter, **changes)


def test_replay_needs_the_packed_router_without_fusion() -> None:
    for kind, fusion in (TopKRouter, False), (PackedRouter, True):
        found = routing(kind, moe_router_fusion=fusion)
        with pytest.raises(ConfigError, match=f"it is {fusion}"):
            found.with_routing([], None, record=True)
        assert found.with_routing([], None, record=False) == []
    assert routing(PackedRouter).with_routing([], [], record=True) == []


def test_a_dense_model_has_no_routing() -> None:
    found = ModelRouting([torch.nn.Linear(1, 1)], config(num_moe_experts=None), Layout(), 0)
    with pytest.raises(DataError, match="no experts"):
        found.with_routing([], [], record=False)


def test_moe_layers_follow_moe_layer_freq() -> None:
    assert moe_layers(config()) == [0, 1, 2, 3]
    assert moe_layers(config(moe_layer_freq=2)) == [0, 2]
    assert moe_layers(config(moe_layer_freq=[0, 1, 1, 0])) == [1, 2]
    assert moe_layers(config(num_moe_experts=None)) == []
