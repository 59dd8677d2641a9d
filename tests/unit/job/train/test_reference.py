from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapack.job.checkpoint.state import RunState
from megapack.job.train.passes import Reference

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


def test_a_reference_of_its_own_leaves_the_policy_as_it_was() -> None:
    chunk = torch.nn.ModuleDict({"router": Router()})
    state = dict(chunk.named_parameters()) | dict(chunk.named_buffers())

    def load() -> None:
        for value in state.values():
            value.data.fill_(9.0)

    reference = Reference([chunk], load)
    assert state["router.weight"].tolist() == [1.0, 1.0]
    assert state["router.expert_bias"].tolist() == [0.0, 0.0]
    with reference.weights():
        assert state["router.weight"].tolist() == [9.0, 9.0]
        assert state["router.expert_bias"].tolist() == [9.0, 9.0]
    assert state["router.weight"].tolist() == [1.0, 1.0]


class Group:
    """A bucket of parameters of which another rank has updated its part."""

    def __init__(self, param: torch.nn.Parameter) -> None:
        self.param = param
        self.param_gather_handle: Any = None
        self.param_gather_dispatched = False
        self.num_gathers = 0

    def start_param_sync(self, force_sync: bool = False) -> None:
        assert force_sync
        self.param.data.fill_(9.0)
        self.param_gather_dispatched = True
        self.num_gathers += 1


def overlapping() -> tuple[Any, Group]:
    """A chunk whose parameters are gathered in the next forward."""
    layer: Any = torch.nn.Linear(2, 2)
    group = Group(layer.weight)
    layer.ddp_config = SimpleNamespace(overlap_param_gather=True)
    layer.bucket_groups = [group]
    layer.expert_parallel_bucket_groups = []
    return layer, group


def test_pending_parameters_are_gathered_before_they_are_copied() -> None:
    layer, group = overlapping()
    reference = Reference([layer])
    assert (reference.initial[layer.weight] == 9.0).all()
    layer.weight.data.fill_(1.0)
    group.param_gather_dispatched = False
    with reference.weights():
        assert group.num_gathers == 2
    assert (layer.weight == 9.0).all(), "the old values came back"
    with reference.weights():
        assert group.num_gathers == 2, "gathered once more"


def test_pending_parameters_are_gathered_before_they_are_saved(tmp_path: Path) -> None:
    layer, group = overlapping()

    def stop(force_sync: bool) -> None:
        raise InterruptedError

    group.start_param_sync = stop  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        RunState([layer], None).writer(tmp_path, num_threads=1, device=torch.device("cpu"))
