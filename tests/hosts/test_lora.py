"""Megatron-Bridge's LoRA on planned rows equals the peft package on transformers' models.

peft and Bridge are installed from the package index without their dependencies. Layers are
Megatron's, or Transformer Engine's, whose Python Bridge imports.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.child import python_path
from tests.dist.spawn import ROOT, checked_job
from tests.documents import python_blocks
from tests.hf_models import make_folder
from tests.hosts.lora import packages
from tests.hosts.lora.cases import (
    ALPHA,
    CASES,
    NUM_ADAPTERS,
    RANK,
    RESUMED,
    SAVED,
    SEVERAL,
    TRAINED,
)
from tests.marks import needs_te
from tests.te_python import VERSION, te_folder
from tools.hosting import sources

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps, needs_te]

EXACT = [name for name in CASES if name not in (*TRAINED, *SEVERAL)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers write."""
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    """What the workers found, by case."""
    try:
        packages.install()
    except sources.NoSource as error:
        pytest.skip(str(error))
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
def test_gradients_and_logprobs_of_adapters_equal_peft(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[name]
    assert result["num_tensors"] >= 32
    assert result["gradient_error"] < 1e-5
    assert result["worst_tensor_error"] < 3e-5, result["worst_tensor"]
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-6)
    assert result["logprob_error"] < 3e-5
    assert result["base_logprob_error"] < 3e-5
    # Rows are made as the case says.
    assert result["num_rows"] > 1
    assert (result["shared_tokens"] > 10) == ("prefixes" in name)
    assert (result["num_pieces"] == 2) == ("pieces" in name)
    # One product per adapter's matrix and row; none of frozen layers.
    assert result["put_off_per_row"] == (1 if "split" in name else 0)


@pytest.mark.parametrize("name", SEVERAL)
def test_gradients_of_each_of_several_adapters_equal_peft_with_it_alone(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[name]
    assert result["num_tensors"] >= 32 * NUM_ADAPTERS
    assert result["gradient_error"] < 1e-5
    assert result["worst_tensor_error"] < 3e-5, result["worst_tensor"]
    assert (result["num_mixed"] == 0) == name.endswith("_one")
    assert (result["num_wide"] > 0) == name.endswith("_wide")
    assert (result["shared_tokens"] > 0) == name.endswith("_prefixes")
    assert (result["num_pieces"] > 0) == name.endswith("_pieces")


@pytest.mark.parametrize("name", EXACT)
def test_exported_adapters_are_those_of_peft(
    name: str, results: dict[str, dict[str, Any]], folder: Path
) -> None:
    family = CASES[name].family
    exported, expected = (tensors(folder / f"{one}_peft") for one in (name, family))
    if family == "qwen3_moe":
        # Since transformers 5 peft adapts the parameter that stacks the experts; in folders each
        # has its own projections.
        expected = {one: own for one, own in expected.items() if ".experts." not in one}
        expected |= of_experts(torch.load(folder / f"{family}.pt")["weights"])
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[one], expected[one]) for one in expected)
    config = json.loads((folder / f"{name}_peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert results[name]["loads"]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def of_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts' adapters by peft's names, from Bridge's."""
    found = {}
    for key, value in weights.items():
        if ".local_experts." not in key:
            continue
        _, _, layer, *_, expert, fc, _, part, _ = key.split(".")
        parts = ("gate_proj", "up_proj") if fc == "linear_fc1" else ("down_proj",)
        is_out = part == "linear_out"
        values = value.chunk(len(parts)) if is_out else [value] * len(parts)
        for one, own in zip(parts, values, strict=True):
            module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{one}"
            found[f"{module}.lora_{'B' if is_out else 'A'}.weight"] = own
    return found


def test_peft_loads_exported_adapters(results: dict[str, dict[str, Any]], folder: Path) -> None:
    names = ["tp2_peft", "pp2_vpp2_peft"]
    out = folder / "exported.json"
    checked_job(1, "tests.hosts.lora.exported", [str(folder), str(out), *names], timeout_s=300)
    errors = json.loads(out.read_text())
    assert list(errors) == names
    assert max(errors.values()) < 1e-6


def test_what_peft_cannot_express_is_refused(results: dict[str, dict[str, Any]]) -> None:
    assert "export them by megapack.job.hf.export_adapters" in results["tp2"]["export_error"]
    assert (
        "k_proj.lora_A.weight differ, and Megatron-Bridge's LoRA has one matrix"
        in (results["tp2"]["load_error"])
    )


def test_a_checkpoint_with_adapters_continues_on_another_layout(
    results: dict[str, dict[str, Any]], folder: Path
) -> None:
    norms = [results[name]["second_norm"] for name in (SAVED, RESUMED)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    saved, resumed = (tensors(folder / f"{name}_second_peft") for name in (SAVED, RESUMED))
    first = tensors(folder / f"{SAVED}_peft")
    assert saved.keys() == resumed.keys() == first.keys()
    for name, value in saved.items():
        assert not torch.equal(value, first[name])
        torch.testing.assert_close(resumed[name], value, rtol=1e-4, atol=1e-5)


def test_the_distributed_optimizer_trains_the_same(results: dict[str, dict[str, Any]]) -> None:
    whole, sharded = (results[name] for name in TRAINED)
    assert sharded["norms"] == pytest.approx(whole["norms"], rel=2e-5)
    assert sharded["sums"] == pytest.approx(whole["sums"], rel=2e-5)
    assert len(set(whole["norms"])) == 3


def test_ddp_has_gradients_of_adapters_only(results: dict[str, dict[str, Any]]) -> None:
    result = results["dp2"]
    assert result["num_trained"] <= result["buffers"] < 1.1 * result["num_trained"]


@pytest.mark.parametrize("several", [False, True])
def test_the_loop_of_the_document_runs(several: bool, tmp_path: Path) -> None:
    """As it says, by `megapack run --cpu` with Bridge and Transformer Engine's Python installed."""
    try:
        packages.install()
    except sources.NoSource as error:
        pytest.skip(str(error))
    block, adapters = python_blocks("docs/lora.md")
    if several:
        block = re.sub(r"def adapt\(chunks\):\n(    .*\n)+", lambda _: adapters, block)
        block = block.replace(
            "max_tokens_per_gpu=64)", "max_tokens_per_gpu=64, adapter_ids=IDS * 4)"
        )
        one = "for module in [m for chunk in chunks for m in chunk.modules()]:\n"
        one += (
            "    if isinstance(module, LoRALinear):\n        module.adapter = module.adapter[1]\n"
        )
        block = block.replace("export_adapters(chunks", f"{one}export_adapters(chunks")
        assert block.count("adapter_ids") == block.count("module.adapter[1]") == 1
    (tmp_path / "my_lora.py").write_text(block)
    make_folder(tmp_path / "models/Qwen3-0.6B", "qwen3")
    bridge = sources.installed(sources.release("megatron_bridge"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "megapack", "run", "--cpu", "my_lora.py"],
        cwd=tmp_path,
        # Unbuffered, a line of one rank may be in the middle of another's.
        env={
            **os.environ,
            "PYTHONPATH": python_path(ROOT, te_folder(), bridge),
            "PYTHONUNBUFFERED": "",
        },
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # Megatron-Core 0.19 warns on stdout too.
    first, *_, last = map(float, re.findall(r"^\d+\.\d+$", done.stdout, re.MULTILINE))
    assert last < first
