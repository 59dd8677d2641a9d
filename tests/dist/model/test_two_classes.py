"""A model is the same as a GPTModel and as a HybridModel, in gradients and in checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import problem
from tests.dist.hf.hf_cases import FAMILIES
from tests.dist.run_cases import selected_names
from tests.dist.spawn import checked_job, rank_reports
from tests.hf_models import make_folder
from tests.marks import needs_hybrid

pytestmark = [pytest.mark.dist, needs_hybrid]

# gpt_oss is a family too.
NAMES = {
    **{name: 0 for name, (model, _) in problem.MODELS.items() if model.layer_pattern is None},
    **dict.fromkeys(FAMILIES, 0),
}
# Each kind of layer once; the weekly tests run all.
SAMPLE = ("moe_shared", "gpt_oss", "dsa", "mtp_other", "gemma3_text", "gemma4_experts", "olmo2")
WEEKLY_CASES = NAMES.keys() - set(SAMPLE)


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the two classes have otherwise, by model."""
    names = selected_names(request)
    folder = tmp_path_factory.mktemp("classes")
    for family in names & set(FAMILIES):
        make_folder(folder / family, family, vocab_size=problem.VOCAB_SIZE)
    args = [str(folder), str(folder), *names]
    checked_job(1, "tests.dist.model.classes_worker", args, timeout_s=500)
    return rank_reports(folder, 1)[0]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_checkpoints_are_the_same(name: str, reports: dict[str, Any]) -> None:
    found = reports[name]
    assert found["classes"] == ["GPTModel", "HybridModel"]
    assert found["num_gradients"] > 5
    assert found["losses"][0] == found["losses"][1]
    assert found["gradients"] == []
    assert found["saved"] == []


@pytest.mark.parametrize("name", ["letters/plain", "letters/moe_shared", "letters/dsa"])
def test_letters_are_halves_of_blocks(name: str, reports: dict[str, Any]) -> None:
    """Also where experts are, which the config of a HybridModel need not say."""
    found = reports[name]
    assert found["left"] == []
    assert found["num_gradients"] > 5
    assert found["found"] == found["expected"]
    assert found["gradients"] == []
