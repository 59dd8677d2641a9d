"""Megatron-Bridge's LoRA on planned rows equals the peft package on transformers' models.

peft and Bridge are installed from the package index without their dependencies. Layers are
Megatron's, or Transformer Engine's, whose Python Bridge imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.child import python_path
from tests.dist.spawn import ROOT, checked_job
from tests.documents import python_blocks
from tests.hf_models import make_folder
from tests.hosts.lora import packages
from tests.hosts.lora.cases import CASES, TRAINED
from tests.te_python import VERSION, needs_te, te_folder
from tools.hosting import sources

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps, needs_te]

EXACT = [name for name in CASES if name not in TRAINED]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the workers found, by case."""
    try:
        packages.install()
    except sources.NoSource as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("lora")
    families = sorted({case.family for case in CASES.values()})
    checked_job(1, "tests.hosts.lora.reference", [str(folder), *families], timeout_s=300)
    found: dict[str, dict[str, Any]] = {}
    for world in (1, 2):
        out = folder / f"world{world}.json"
        names = [name for name, case in CASES.items() if case.layout.world_size == world]
        arguments = [str(folder), str(out), *names]
        checked_job(world, "tests.hosts.lora.worker", arguments, timeout_s=600, te=VERSION)
        found |= json.loads(out.read_text())
    return found


@pytest.mark.parametrize("name", EXACT)
def test_gradients_of_adapters_equal_peft(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert result["num_tensors"] >= 32
    assert result["gradient_error"] < 1e-5
    assert result["worst_tensor_error"] < 3e-5, result["worst_tensor"]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-6)


@pytest.mark.parametrize("name", EXACT)
def test_logprobs_with_and_without_adapters_equal_peft(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    assert results[name]["logprob_error"] < 3e-5
    assert results[name]["base_logprob_error"] < 3e-5


@pytest.mark.parametrize("name", EXACT)
def test_rows_are_made_as_the_case_says(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert result["num_rows"] > 1
    assert (result["shared_tokens"] > 10) == ("prefixes" in name)
    assert (result["num_pieces"] == 2) == ("pieces" in name)


@pytest.mark.parametrize("name", EXACT)
def test_only_gradients_of_adapters_are_put_off(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    """One product per adapter's matrix and row; none of frozen layers."""
    assert results[name]["put_off_per_row"] == (1 if "split" in name else 0)


def test_the_distributed_optimizer_trains_the_same(results: dict[str, dict[str, Any]]) -> None:
    whole, sharded = (results[name] for name in TRAINED)
    assert sharded["norms"] == pytest.approx(whole["norms"], rel=2e-5)
    assert sharded["sums"] == pytest.approx(whole["sums"], rel=2e-5)
    assert len(set(whole["norms"])) == 3


def test_ddp_has_gradients_of_adapters_only(results: dict[str, dict[str, Any]]) -> None:
    result = results["dp2"]
    assert result["num_trained"] <= result["buffers"] < 1.1 * result["num_trained"]


def test_the_loop_of_the_document_runs(tmp_path: Path) -> None:
    """As it says, by `megapack run --cpu` with Bridge and Transformer Engine's Python installed."""
    try:
        packages.install()
    except sources.NoSource as error:
        pytest.skip(str(error))
    (block,) = python_blocks("docs/api/lora.md")
    (tmp_path / "my_lora.py").write_text(block)
    make_folder(tmp_path / "models/Qwen3-0.6B", "qwen3")
    bridge = sources.installed(sources.release("megatron_bridge"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "megapack", "run", "--cpu", "my_lora.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(ROOT, te_folder(), bridge)},
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, *_, last = map(float, done.stdout.split())
    assert last < first
