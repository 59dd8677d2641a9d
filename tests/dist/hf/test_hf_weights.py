"""Folders of all families are loaded and exported bit by bit, on layouts of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.hf.hf_weights_worker import ALL_CASES, CASES
from tests.dist.spawn import checked_job, rank_reports
from tests.hf_models import cached_folder
from tests.marks import needs_hybrid
from tests.megatron import HAS_HYBRID
from tests.unit.job.hf.tiny_llama import read_folder

pytestmark = pytest.mark.dist

WORLD = 4
# A case leaves process groups with their threads behind until its job ends.
CASES_PER_JOB = 10
IN_BF16 = [name for name, case in ALL_CASES.items() if case.dtype == "bf16"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cases' exports and the ranks' reports, beside that of the models."""
    folder = tmp_path_factory.mktemp("hf")
    models = folder / "models"
    (folder / "out").mkdir()
    models.mkdir()
    cases = ALL_CASES if HAS_HYBRID else CASES
    for family in {case.family for case in cases.values()}:
        (models / family).symlink_to(cached_folder(family))
    names = [*cases, "errors"]
    for first in range(0, len(names), CASES_PER_JOB):
        args = [str(models), str(folder / "out"), *names[first : first + CASES_PER_JOB]]
        checked_job(WORLD, "tests.dist.hf.hf_weights_worker", args, timeout_s=300)
    return folder


def reports(ran: Path, name: str) -> list[Any]:
    """What each rank found in a case."""
    return rank_reports(ran / "out" / f"{name}_ranks", WORLD)


def params(*without: str) -> list[Any]:
    """The cases' names but for some; those of hybrid models are skipped where there is none."""
    return [
        pytest.param(name, marks=() if name in CASES else needs_hybrid)
        for name in ALL_CASES
        if name not in without
    ]


@pytest.mark.parametrize("name", params("value", "next_value", *IN_BF16))
def test_an_export_without_training_is_bitwise_the_folder(name: str, ran: Path) -> None:
    expected = read_folder(ran / "models" / ALL_CASES[name].family)
    found = read_folder(ran / "out" / name)
    assert found.keys() == expected.keys()
    differing = [n for n in expected if not torch.equal(found[n], expected[n])]
    assert differing == []
    # All ranks write.
    assert {report["files"] >= WORLD for report in reports(ran, name)} == {True}


@pytest.mark.parametrize("name", params())
def test_each_rank_reads_its_own_rows(name: str, ran: Path) -> None:
    """The folders are in fp32; what is held and not read is padding, and a value head."""
    for report in reports(ran, name):
        width = 2 if ALL_CASES[name].dtype == "bf16" else 1
        assert 0 < report["bytes"] <= width * report["held"]
        assert report["padding"] in (-1.0, 0.0)
    assert 0.0 in {report["padding"] for report in reports(ran, name)}


@pytest.mark.parametrize("name", ["value", pytest.param("next_value", marks=needs_hybrid)])
def test_a_fresh_value_head_is_zeros_and_replaces_the_output_layer(name: str, ran: Path) -> None:
    expected = read_folder(ran / "models" / ALL_CASES[name].family)
    found = read_folder(ran / "out" / name)
    # Predictions of further tokens need the output layer.
    dropped = {own for own in expected if own.startswith(("lm_head.", "mtp."))}
    assert expected.keys() - found.keys() == dropped
    assert found.keys() - expected.keys() == {"score.weight"}
    assert torch.equal(found["score.weight"], torch.zeros(1, 64))
    assert all(torch.equal(found[n], expected[n]) for n in found.keys() & expected.keys())


@pytest.mark.parametrize(
    ("name", "in_fp32"),
    [
        ("latent_bf16", {"e_score_correction_bias": 3}),
        pytest.param("next_bf16", {"A_log": 3, "dt_bias": 3}, marks=needs_hybrid),
        pytest.param(
            "nemotron_bf16",
            {"e_score_correction_bias": 2, "A_log": 3, "dt_bias": 3, "D": 3},
            marks=needs_hybrid,
        ),
    ],
)
def test_a_bf16_model_keeps_some_parameters_in_fp32(
    name: str, in_fp32: dict[str, int], ran: Path
) -> None:
    """Biases that choose experts, and decays of recurrent layers; all are exported in the folder's
    types. Layers that are not trained, those of the prediction of further tokens, are copied."""
    expected = read_folder(ran / "models" / ALL_CASES[name].family)
    found = read_folder(ran / "out" / name)
    assert found.keys() == expected.keys()
    assert {end: sum(own.endswith(f".{end}") for own in expected) for end in in_fp32} == in_fp32
    for name, value in expected.items():
        is_exact = name.startswith("mtp.") or name.endswith(tuple(in_fp32))
        kept = value if is_exact else value.bfloat16().float()
        assert torch.equal(found[name], kept), name


def test_an_error_of_one_rank_is_every_ranks(ran: Path) -> None:
    for report in reports(ran, "errors"):
        # qwen3_tied has no output layer; nothing was loaded.
        assert report["load"].startswith("ConfigError: ")
        assert "lacks 1 of the model's 47 tensors, such as lm_head.weight" in report["load"]
        assert "1 of 4 ranks failed: rank 2: CheckpointError" in report["export"]
        assert "cannot be written (No space left on device)" in report["export"]
        assert "exists; set another folder, or remove it" in report["exists"]
        # One rank has read the row that differs.
        assert report["own_head"].startswith("ConfigError: ")
        assert "lm_head.weight differs from model.embed_tokens.weight" in report["own_head"]
    left = {path.name for path in (ran / "out").glob("failed*")}
    assert left == {"failed"}
    assert (ran / "out" / "failed").is_file()
