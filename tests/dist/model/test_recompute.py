"""Gradients are those of a step without recompute, whatever Megatron recomputes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.dist.spawn import checked_job

pytestmark = pytest.mark.dist

CASES = {
    1: [
        *("gpt2/mlp+core_attn/later", "sandwich/mlp", "experts/mlp+moe", "mtp/mlp"),
        *("shared/shared_experts", "mla_plain/mla_up_proj"),
    ],
    2: ["bias/mlp/later", "shared/shared_experts+mlp", "mla/mla_up_proj"],
}

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Found]:
    """The worker's results on a number of tensor-parallel ranks."""
    results: dict[int, Found] = {}

    def get(world: int) -> Found:
        if world not in results:
            out = tmp_path_factory.mktemp("recompute") / "out.json"
            args = [str(out), *CASES[world]]
            checked_job(world, "tests.dist.model.recompute_worker", args, timeout_s=150)
            results[world] = json.loads(out.read_text())
        return results[world]

    return get


@pytest.mark.parametrize(("world", "name"), [(w, name) for w, own in CASES.items() for name in own])
def test_a_recomputed_module_has_the_same_gradients(
    world: int, name: str, found: Callable[[int], Found]
) -> None:
    result = found(world)[name]
    assert result["num_gradients"] > 20
    assert result["different"] == []
    assert result["zero"] == []
