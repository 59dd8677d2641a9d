"""Sequence-level objectives and value heads equal the one-sample reference."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.dist.losses.sequence_problem import CASES, KINDS, LAYOUTS, SPOT
from tests.dist.run_cases import selected_names
from tests.dist.spawn import checked_job

pytestmark = pytest.mark.dist

NAMES = [f"{place} {name}" for place, name in CASES]
DAILY = {
    "single": ("gspo", "tis", "tis_sequence", "seq_mask_tis"),
    "cp2_pp2_vpp2": ("gspo", "dpo", "value", "teacher_kl", "distill_forward"),
    "dp2_pp2_vpp2": ("gspo", "value", "reward"),
    "tp2_sp_pp2": ("gspo_token", "dpo", "value", "tis", "distill_reverse"),
}
COMPARED = ("gspo", "dpo", "tis", "value")
"""Objectives that several of these layouts have."""
WEEKLY_CASES = {
    *(name for name in NAMES if name.split()[1] not in DAILY.get(name.split()[0], ())),
    *(kind for kind in KINDS if kind not in COMPARED),
}


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The workers' results on the layouts of the selected tests, by case."""
    selected = sorted(selected_names(request))
    folder = tmp_path_factory.mktemp("sequence")
    reference = str(folder / "reference.pt")
    checked_job(1, "tests.dist.losses.sequence_reference", [reference], timeout_s=180)
    merged: dict[str, dict[str, Any]] = {}
    jobs = [
        (layout.world_size, place, [name for name in selected if name.split()[0] == place])
        for place, layout in LAYOUTS.items()
    ]
    others = [(world, name, [name]) for name in ("critics", "extremes") for world in (1, 2)]
    for world, place, names in (job for job in (*jobs, *others) if job[2]):
        out = folder / f"{place}{world}.json"
        args = [reference, str(out), place, *(name.split()[-1] for name in names)]
        checked_job(world, "tests.dist.losses.sequence_worker", args, timeout_s=300)
        merged.update(json.loads(out.read_text()))
    return merged


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_equal_the_reference(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[name]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)
    assert result["gradient_norm"] > 1e-3
    assert result["gradient_error"] < 1e-5
    # Margins of rewards do not depend on the last norm's bias. Its gradient is 0, so a relative
    # error means nothing.
    assert name.endswith("reward") or result["worst_parameter"] < 1e-4


@pytest.mark.parametrize("name", [name for name in NAMES if name.split()[1] in ("value", "reward")])
def test_values_and_scores_equal_the_reference(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    assert results[name]["output_error"] < 1e-5


def test_rows_hold_several_pairs_and_ratios_are_clipped(
    results: dict[str, dict[str, Any]],
) -> None:
    names = [name for name in NAMES if name in results]
    assert max(results[name]["sets_packed"] for name in names) > 1
    for name in names:
        # Several rows even with two context-parallel ranks, whose rows hold twice the budget.
        assert results[name]["num_rows"] > 1
        if name.endswith("gspo"):
            assert 0.05 < results[name]["metrics"]["clip_fraction"] < 0.8
        assert "_pad" not in name or results[name]["num_padding_rows"] > 0
    for kind in ("tis", "tis_sequence", "seq_mask_tis"):
        assert 0.1 < results[f"single {kind}"]["metrics"]["engine_clip_fraction"] < 0.9
        metrics = results[f"single {kind}"]["metrics"]
        assert metrics["engine_ratio_max"] > metrics["engine_ratio"] > 0.5
    fractions = results["dp2_pp2_vpp2 value"]["metrics"]["value_clip_fraction"]
    assert 0.05 < fractions < 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_do_not_depend_on_the_layout(kind: str, results: dict[str, dict[str, Any]]) -> None:
    names = [f"{place} {kind}" for place in LAYOUTS]
    first, *others = (results[name]["metrics"] for name in names if name in results)
    assert first
    assert others
    for metrics in others:
        assert metrics == pytest.approx(first, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_value_head_is_trained_in_fp32_and_saved(
    dtype: str, world: int, results: dict[str, dict[str, Any]]
) -> None:
    plain, split = (results[f"critics {world}"][f"{dtype} {split}"] for split in (False, True))
    for result in (plain, split):
        assert result["dtype"] == "torch.float32"
        assert result["in_checkpoint"]
        assert result["losses"][-1] < 0.8 * result["losses"][0]
    near = {"fp32": 1e-4, "bf16": 2e-2}[dtype]
    assert split["losses"] == pytest.approx(plain["losses"], rel=near)
    assert plain["losses"] == pytest.approx(results["critics 1"]["fp32 False"]["losses"], rel=0.05)


def test_a_value_head_on_tied_embeddings_is_refused(results: dict[str, dict[str, Any]]) -> None:
    for world in (1, 2):
        assert "untie_embeddings=true" in results[f"critics {world}"]["tied"]


@pytest.mark.parametrize("world", [1, 2])
def test_log_probs_that_are_far_apart(world: int, results: dict[str, dict[str, Any]]) -> None:
    """Two context-parallel ranks, or one. The token is named where its loss has no value."""
    found = results[f"extremes {world}"]
    for name in ("clipped", "without advantage", "dual clip"):
        near, far, difference = found[name]
        assert far == near
        assert difference == 0
    sample, token = SPOT
    place = f"token {token} of sample {sample} (from 0, prompt included; id {found['id']}) has loss"
    for name, far in (("unbounded", "old_logprobs -20"), ("reference", "ref_logprobs 19")):
        assert f"{place} inf, log-prob -" in found[name]
        assert far in found[name]
