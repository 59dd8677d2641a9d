"""What is known to be wrong with a host's tower is said once, before the first call."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapack.hosts import megatron_bridge, patching
from megapack.hosts.shared.towers import faults_of_tower, warning_of_towers

pytestmark = pytest.mark.hosts


class Chunk(torch.nn.Module):
    """A model in DDP."""

    def __init__(self, tower: Any = None, *, splits: bool = False, overlaps: bool = False) -> None:
        super().__init__()
        self.module = torch.nn.Module()
        self.module.language_model = torch.nn.Linear(2, 2)
        if tower is not None:
            self.module.visual = tower
        self.config = SimpleNamespace(sequence_parallel=splits)
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=overlaps)


def made_tower(*, levels: bool = False, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    tower = torch.nn.Module()
    tower.rotary = torch.nn.Module()
    tower.rotary.register_buffer("inv_freq", torch.ones(2, dtype=dtype))
    if levels:
        tower.deepstack_merger_list = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    return tower


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        (Chunk(splits=True, overlaps=True), []),
        (Chunk(made_tower(levels=True)), []),
        (Chunk(made_tower(), splits=True), []),
        (Chunk(made_tower(levels=True), splits=True), ["DeepStack's gradients are wrong"]),
        (Chunk(made_tower(), overlaps=True), ["overlap_grad_reduce ends a step"]),
        (Chunk(made_tower(dtype=torch.bfloat16)), ["inv_freq has lost its precision"]),
    ],
)
def test_faults_of_a_tower(chunk: Chunk, says: list[str]) -> None:
    found = faults_of_tower(chunk)
    assert len(found) == len(says)
    assert all(part in fault for part, fault in zip(says, found, strict=True))


def test_the_patch_that_corrects_a_fault_ends_its_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = Chunk(made_tower(levels=True), splits=True)
    assert faults_of_tower(chunk)
    applied = (SimpleNamespace(host="bridge_deepstack"),)
    monkeypatch.setattr(patching, "status", lambda: applied)
    assert faults_of_tower(chunk) == []


def test_a_fault_is_said_before_the_first_call(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Any] = []
    run = warning_of_towers(lambda **step: calls.append(step) or len(caplog.messages))
    chunk = Chunk(made_tower(), overlaps=True)
    with caplog.at_level(logging.WARNING, "megapack"):
        assert run(model=[chunk], num_microbatches=3) == 1
        assert run(model=chunk, num_microbatches=4) == 1
    assert calls[1] == {"model": chunk, "num_microbatches": 4}


@pytest.mark.parametrize("splits", [True, False])
def test_deepstacks_features_are_those_of_all_ranks_under_sequence_parallelism(
    splits: bool, originals: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(masks: Any, features: Any, *sizes: int, **named: Any) -> Any:
        return masks, features, sizes, named

    name = f"{megatron_bridge._VISION}.split_deepstack_embs"
    originals[name] = own
    copies = "megatron.core.tensor_parallel.copy_to_tensor_model_parallel_region"
    monkeypatch.setattr(copies, lambda features: ("whole", features))
    split = megatron_bridge.split_deepstack_embs
    features = ["whole", "level"] if splits else "level"
    found = split("mask", ["level"], 2, 1, sequence_parallel=splits)
    assert found == (
        "mask",
        [tuple(features) if splits else features],
        (2, 1),
        {"sequence_parallel": splits},
    )
    assert split(None, None, 2, sequence_parallel=splits)[:2] == (None, None)
