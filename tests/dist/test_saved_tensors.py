"""The memory model's activations are what autograd keeps of real Megatron layers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.dist.saved_tensors_worker import CASES
from tests.dist.spawn import checked_job

pytestmark = pytest.mark.dist

NAMES = [name for cases in CASES.values() for name in cases]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Bytes on each rank, by case."""
    folder = tmp_path_factory.mktemp("saved")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for world in CASES:
        out = folder / f"world{world}"
        checked_job(world, "tests.dist.saved_tensors_worker", [str(out)], timeout_s=200)
        for rank in range(world):
            for name, facts in json.loads((folder / f"world{world}.{rank}").read_text()).items():
                found[name].append(facts)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_predicted_activations_are_within_5_percent(
    name: str, when: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    """The sum over ranks, because the router does not send each rank of experts as much."""
    measured = sum(rank["measured"][when] for rank in results[name])
    predicted = sum(rank["predicted"][when] for rank in results[name])
    assert predicted == pytest.approx(measured, rel=0.05)
    assert measured > 0 or (when == "backward" and "full" not in name)
