"""The memory model's bytes and the cost model's operations are those of real Megatron layers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from megatron.core.transformer import multi_latent_attention

from tests.dist.exactness.layer_counts_worker import CASES, KEEPS_SCORES, OPERATIONS
from tests.dist.run_cases import selected_names
from tests.dist.spawn import checked_job

pytestmark = pytest.mark.dist

PADS_VALUES = hasattr(multi_latent_attention, "_prepare_mla_core_attention_value")
NAMES = [name for cases in CASES.values() for name in cases]
WEEKLY_CASES = {"dense_gelu", "qkv_bias", "mla_direct_queries", "cp2_mla", "tp2_sp_fused"}
WITH_NORM_BIASES = [
    name
    for cases in CASES.values()
    for name, case in cases.items()
    if case.config.normalization == "LayerNorm"
]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Counts of each rank, by case, for the cases of the selected tests."""
    wanted = selected_names(request)
    folder = tmp_path_factory.mktemp("counts")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for world in CASES:
        out = folder / f"world{world}"
        args = [str(out), *(name for name in CASES[world] if name in wanted)]
        checked_job(world, "tests.dist.exactness.layer_counts_worker", args, timeout_s=200)
        for rank in range(world):
            for name, facts in json.loads((folder / f"world{world}.{rank}").read_text()).items():
                found[name].append(facts)
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name not in KEEPS_SCORES])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_predicted_activations_are_within_5_percent(
    name: str, when: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    """The sum over ranks, because the router does not send each rank of experts as much."""
    measured = sum(rank["measured"][when] for rank in results[name])
    predicted = sum(rank["predicted"][when] for rank in results[name])
    assert predicted == pytest.approx(measured, rel=0.05)
    assert measured > 0 or (when == "backward" and "full" not in name)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", ["matrices", "attention"])
def test_predicted_operations_are_within_3_percent(
    name: str, kind: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    """Matrices in forward and backward, with recomputation and the head's second logits."""
    (facts,) = results[name]
    if PADS_VALUES and (name, kind) == ("mla_narrow_values", "attention"):
        pytest.skip("after 0.19 Megatron-Core pads values of packed rows to the width of keys")
    counted = facts["counted_operations"][kind]
    assert counted > 0
    assert facts["predicted_operations"][kind] == pytest.approx(counted, rel=0.03)


# Norms are counted without biases.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITH_NORM_BIASES])
def test_predicted_trained_parameters_are_those_of_the_model(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    """The sum over ranks: a frozen expert is on one of them."""
    predicted, trained = (
        [sum(counts) for counts in zip(*(rank[kind] for rank in results[name]), strict=True)]
        for kind in ("predicted_trained", "trained")
    )
    assert predicted == trained
