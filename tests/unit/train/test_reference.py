from __future__ import annotations

import pytest
import torch

from megapack.train.passes import Reference

pytestmark = pytest.mark.unit


class Router(torch.nn.Module):
    """A router: a weight, an expert bias that steps change, and token counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("expert_bias", torch.zeros(2))
        self.register_buffer("local_tokens_per_expert", torch.zeros(2), persistent=False)


def test_the_expert_bias_is_part_of_the_policy() -> None:
    chunk = torch.nn.ModuleDict({"router": Router()})
    reference = Reference([chunk])
    state = dict(chunk.named_parameters()) | dict(chunk.named_buffers())
    for value in state.values():
        value.data.add_(5.0)
    with reference.weights():
        assert state["router.weight"].tolist() == [1.0, 1.0]
        assert state["router.expert_bias"].tolist() == [0.0, 0.0]
        assert state["router.local_tokens_per_expert"].tolist() == [5.0, 5.0]
    assert state["router.weight"].tolist() == [6.0, 6.0]
    assert state["router.expert_bias"].tolist() == [5.0, 5.0]


def test_trained_weights_are_restored_each_time() -> None:
    layer = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    reference = Reference([layer])
    for _ in range(3):
        layer.weight.data.add_(1.0)
        before = layer.weight.detach().clone()
        with reference.weights():
            assert torch.equal(layer.weight, reference.initial[layer.weight])
        assert torch.equal(layer.weight, before)
