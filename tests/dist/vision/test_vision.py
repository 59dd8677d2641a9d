"""Models with images on layouts and in every kind of rows, against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.run_cases import selected_names
from tests.dist.vision.vision_cases import (
    ALL_CASES,
    CASES,
    MUTATIONS,
    TRAINED,
    run_vision_cases,
    runnable,
)

pytestmark = pytest.mark.dist

SAMPLE = (
    "qwen3_vl-single-pieces-all",
    "qwen3_vl-dp2-whole-all-text_step",
    "qwen3_vl-dp2-whole-all-few",
    "qwen3_vl-pp2_vpp2-whole-all-waves",
    "qwen3_vl-tp2_sp-shared-all-full",
    "qwen3_vl-pp2_vpp2-shared_pieces-all",
    "qwen3_vl_moe-dp2_ep2-shared-all-full",
    "qwen2_5_vl-cp2-shared-merger",
    "qwen2_5_vl-dp2-wide-all",
)
"""Of every kind of rows, and of both ways of rotary sections."""
LIMIT = 1e-5


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    return run_vision_cases(selected_names(request), tmp_path_factory.mktemp("vision"))


def _cases() -> list[Any]:
    weekly = pytest.mark.weekly
    return [pytest.param(name, marks=() if name in SAMPLE else weekly) for name in runnable()]


@pytest.mark.parametrize("name", _cases())
def test_a_cell_is_exact(name: str, results: dict[str, dict[str, Any]]) -> None:
    case, found = CASES[name], results[name]
    parts = {"decoder"} if case.trained in ("all", "frozen") else {"merger"}
    if case.trained in ("all", "tower"):
        parts |= {"tower", "merger"}
        parts |= {"deepstack"} if case.family.startswith("qwen3_vl") else set()
    assert found["gradients"].keys() == parts
    assert max(found["gradients"].values()) < LIMIT, found
    assert found["logprobs_max_error"] < LIMIT
    assert found["loss_error"] < LIMIT
    assert found["norm_error"] < LIMIT
    assert found.get("tower_of_text", 0.0) == 0.0
    assert (found["num_pieces"] > 1) == ("pieces" in case.rows)
    assert (found["most_ranks"] > 1) == (case.rows == "wide")
    if case.rows == "shared":
        assert found["shared_tokens"] > 50


SEEN = ("one_key", "counted_per_tp_rank", "piece_without_images")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if case.mutation in SEEN else pytest.mark.weekly)
        for name, case in MUTATIONS.items()
    ],
)
def test_a_mutation_is_seen(name: str, results: dict[str, dict[str, Any]]) -> None:
    found = results[name]
    if ALL_CASES[name].mutation == "token_prefixes":
        assert "have different images there" in found["raised"]
    elif ALL_CASES[name].mutation == "closure":
        assert "backward through the graph a second time" in found["raised"]
    else:
        assert max(found["gradients"].values()) > 0.01, found


def test_the_grid_has_every_kind() -> None:
    cases = list(CASES.values())
    assert {case.rows for case in cases} >= {"whole", "shared", "pieces", "wide", "split"}
    assert {case.trained for case in cases} == set(TRAINED)
    assert set(SAMPLE) <= CASES.keys()
