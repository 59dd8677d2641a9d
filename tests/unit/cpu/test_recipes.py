"""What recipes of Megatron-LM ask of a GPU, on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.child import child

pytestmark = pytest.mark.unit

RECIPE = """
import json, sys, time
sys.path.insert(0, FOLDER)
sys.modules["triton"] = None  # absent, wherever the test runs
import torch
import torch.distributed as dist
from megapack import cpu
import megatron.training.early as early
cpu.enable()
import megatron.training.initialize as initialize
from megatron.training.initialize import set_jit_fusion_options
import megatron.legacy.fused_kernels as fused_kernels
import megatron.core.transformer.custom_layers.batch_invariant_kernels as kernels

results = {"early": early.VALUE, "triton": "triton" in sys.modules}
results["kernels"] = [kernels.added(2), kernels.tuned(2)]
results["no_cuda"] = initialize.initialize_megatron(lr=1)
results["jit"] = set_jit_fusion_options(tp_size=2)
results["loaded"] = fused_kernels.load(None)

with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.set_stream(torch.cuda.current_stream())
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
start.record()
time.sleep(0.02)
end.record(torch.cuda.current_stream())
end.synchronize()
results["milliseconds"] = start.elapsed_time(end)
results["memory"] = [torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved(0),
                     torch.cuda.memory_stats()["num_alloc_retries"]]
results["name"] = torch.cuda.get_device_name(0)
results["free"] = torch.cuda.mem_get_info()[0] > 0
results["count"] = torch.cuda.device_count()
results["major"] = torch.cuda.get_device_properties(torch.device("cuda:0")).major

store = dist.HashStore()
dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1,
                        device_id=torch.device("cuda:0"))
group = dist.new_group([0], backend="nccl", pg_options=object())
results["backends"] = [dist.get_backend(), dist.get_backend(group)]
print(json.dumps(results))
"""

INITIALIZE = """
def initialize_megatron(lr, allow_no_cuda=False):
    return [lr, allow_no_cuda]

def set_jit_fusion_options(tp_size):
    raise RuntimeError("compiles")
"""
FUSED_KERNELS = "def load(args): raise FileNotFoundError('nvcc')\n"
KERNELS = """
import triton
import triton.language as tl

@triton.jit
def added(x, block: tl.constexpr = 1):
    return x + block

@triton.autotune(configs=[triton.Config({})], key=[])
@triton.jit(launch_metadata=None)
def tuned(x, type=tl.int32):
    return x
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a recipe's questions are answered; its modules are stubs."""
    folder: Path = tmp_path_factory.mktemp("recipe")
    modules = {
        "training/early": "VALUE = 'imported before'\n",
        "training/initialize": INITIALIZE,
        "legacy/fused_kernels": FUSED_KERNELS,
        "core/transformer/custom_layers/batch_invariant_kernels": KERNELS,
    }
    for name, text in modules.items():
        path = folder / "megatron" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for package in path.relative_to(folder / "megatron").parents:
            (folder / "megatron" / package / "__init__.py").touch()
    return child(RECIPE.replace("FOLDER", repr(str(folder))))


def test_a_recipe_starts_without_cuda_and_compiles_nothing(found: dict[str, Any]) -> None:
    assert found["no_cuda"] == [1, True]
    assert found["jit"] is None
    assert found["loaded"] is None


def test_triton_kernels_are_imported_where_triton_is_absent(found: dict[str, Any]) -> None:
    assert found["kernels"] == [3, 2]
    # torch asks for Triton too, and would use the stand-in.
    assert not found["triton"]


def test_the_device_has_a_name_memory_and_a_clock(found: dict[str, Any]) -> None:
    assert found["memory"] == [0, 0, 0]
    assert found["name"] == "cpu"
    assert found["free"]
    assert found["count"] == 1
    assert found["major"] == 10
    assert 15 < found["milliseconds"] < 2000


def test_nccl_is_read_as_gloo(found: dict[str, Any]) -> None:
    assert found["backends"] == ["gloo", "gloo"]


def test_linear_layers_add_weight_gradients_without_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import layers

    from megapack.cpu.megatron import AFTER_IMPORT

    extension = "fused_weight_gradient_mlp_cuda"
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    monkeypatch.setattr(layers, extension, None, raising=False)
    monkeypatch.setitem(sys.modules, extension, layers)
    AFTER_IMPORT["megatron.core.tensor_parallel.layers"](layers)
    weight: Any = torch.nn.Parameter(torch.randn(4, 3))
    weight.main_grad = torch.ones(4, 3)
    rows = torch.randn(5, 1, 3)
    layers.linear_with_grad_accumulation_and_async_allreduce(
        rows,
        weight,
        None,
        gradient_accumulation_fusion=True,
        allreduce_dgrad=False,
        sequence_parallel=False,
    ).sum().backward()
    torch.testing.assert_close(weight.main_grad, 1 + rows.sum((0, 1)).expand(4, 3))


@pytest.mark.weekly
def test_processes_that_a_recipe_starts_run_on_the_cpu_too(tmp_path: Path) -> None:
    startup = Path(__file__).parents[3] / "megapack-startup.pth"
    # As Python does with the start-up file where megapack is installed.
    child = f"exec(open({str(startup)!r}).read()); import torch; torch.ones(1, device='cuda')"
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {child!r}])"
    )
    for command, code in (["-m", "megapack", "run", "--cpu", str(recipe)], 0), (["-c", child], 1):
        env = {**os.environ, "MEGAPACK_PATCH": "", "PYTHONPATH": str(startup.parent)}
        done = subprocess.run(
            [sys.executable, *command], check=False, capture_output=True, text=True, env=env
        )
        assert done.returncode == code, done.stderr
