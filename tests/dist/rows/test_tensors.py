"""Pixels stay with their samples: gradients equal the one-sample reference."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.dist.rows.tensors_worker import LAYOUTS
from tests.dist.spawn import checked_job

pytestmark = pytest.mark.dist

NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The results of each rank, by layout."""
    folder = tmp_path_factory.mktemp("tensors")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for world in LAYOUTS:
        out = folder / f"world{world}"
        checked_job(world, "tests.dist.rows.tensors_worker", [str(out)], timeout_s=200)
        for rank in range(world):
            for name, facts in json.loads((folder / f"world{world}.{rank}").read_text()).items():
                results[name].append(facts)
    return results


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_the_reference(name: str, ranks: dict[str, list[dict[str, Any]]]) -> None:
    assert any(rank["projector"] for rank in ranks[name])
    for rank in ranks[name]:
        assert rank["loss"] == pytest.approx(rank["expected_loss"], rel=1e-5)
        assert rank["gradient_error"] < 1e-5
        assert rank["worst_parameter"] < 1e-4


def test_padding_micro_batches_were_run(ranks: dict[str, list[dict[str, Any]]]) -> None:
    assert ranks["dp2_pp2_vpp2"][0]["padding"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_no_stage_uses_is_refused(
    name: str, ranks: dict[str, list[dict[str, Any]]]
) -> None:
    for rank in ranks[name]:
        assert "no model chunk's forward takes 'audio'" in rank["error"]
