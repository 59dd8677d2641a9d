"""Megatron-Core without CUDA, in a separate process: `enable` lasts for the rest of a process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megapack import cpu, launch
from megapack.errors import ConfigError
from tests.child import child

pytestmark = pytest.mark.unit


TORCH = """
import json, logging, torch
results = {}
import megapack.model, megapack.schedule
from megapack import cpu
results["enabled_by_import"] = cpu.enabled()
before = torch.empty
early = torch.compile(lambda x: x + 1)
cpu.enable()
late = torch.compile(lambda x: x + 2)
results["sums"] = [float(add(torch.zeros(()))) for add in (early, late)]
results["compiled"] = dict(torch._dynamo.utils.counters["frames"])
wrapped = torch.empty, torch.Tensor.to, torch.Tensor.type
cpu.enable()
results["capability"] = torch.cuda.get_device_capability()
try:
    cpu.enable(capability=(9, 0))
except ValueError as error:
    results["other"] = str(error)
results["enabled"] = cpu.enabled()
results["patched"] = torch.empty is not before
results["idempotent"] = wrapped == (torch.empty, torch.Tensor.to, torch.Tensor.type)

x = torch.ones(2, 2)
made = {
    "arange": torch.arange(3, device="cuda"),
    "as_tensor": torch.as_tensor([1.0], device="cuda"),
    "empty": torch.empty(2, device="cuda:0"),
    "empty_like": torch.empty_like(x, device="cuda"),
    "full": torch.full((2,), 3.0, device=torch.device("cuda")),
    "ones": torch.ones(2, device=torch.device("cuda", 0)),
    "rand": torch.rand(2, device="cuda"),
    "randn": torch.randn(2, device=torch.cuda.current_device()),
    "tensor": torch.tensor([1.0], device="cuda"),
    "zeros": torch.zeros(2, device="cuda"),
    "zeros_like": torch.zeros_like(x, device="cuda"),
    "cuda": x.cuda(),
    "cuda_index": x.cuda(0, non_blocking=True),
    "to": x.to("cuda"),
    "to_device": x.to(device=torch.device("cuda")),
    "to_both": x.to("cuda", torch.float64),
    "module": torch.nn.Linear(2, 2).cuda().weight,
    "module_to": torch.nn.Linear(2, 2).to("cuda").weight,
}
results["devices"] = {name: value.device.type for name, value in made.items()}
results["dtype"] = str(made["to_both"].dtype)
results["values"] = made["full"].tolist()
results["types"] = [x.type(), x.bfloat16().type()]
casts = x.type(torch.float64), x.type("torch.DoubleTensor")
results["type_casts"] = [cast.dtype == torch.float64 for cast in casts]
results["plain"] = [torch.ones(2).device.type, x.to(torch.float64).device.type]
results["meta"] = torch.empty(2, device="meta").device.type
torch.cuda.synchronize(); torch.cuda.empty_cache(); torch.cuda.set_device(0)
torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
class OwnStream(torch.cuda.Stream): pass
OwnStream(priority=-1).wait_stream(torch.cuda.Stream())
results["streams"] = isinstance(OwnStream(), torch.cuda.Stream)
results["pinned"] = torch.empty(2, pin_memory=True).is_pinned()
torch.cuda.manual_seed(3)
state = torch.cuda.get_rng_state()
first = torch.rand(4)
torch.cuda.set_rng_state(state)
results["random_state"] = torch.equal(first, torch.rand(4))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def in_torch() -> dict[str, Any]:
    """torch's answers after `enable`."""
    return child(TORCH)


def test_an_import_does_not_enable_it(in_torch: dict[str, Any]) -> None:
    assert not in_torch["enabled_by_import"]
    assert not cpu.enabled()


def test_enabling_twice_changes_nothing(in_torch: dict[str, Any]) -> None:
    assert in_torch["enabled"]
    assert in_torch["patched"]
    assert in_torch["idempotent"]


def test_one_gpu_is_rehearsed_in_a_process(in_torch: dict[str, Any]) -> None:
    assert in_torch["capability"] == [10, 0]
    assert "capability=(9, 0)" in in_torch["other"]
    assert "compute capability (10, 0)" in in_torch["other"]


def test_nothing_is_compiled(in_torch: dict[str, Any]) -> None:
    assert (in_torch["sums"], in_torch["compiled"]) == ([1, 2], {})


def test_calls_for_cuda_get_the_cpu(in_torch: dict[str, Any]) -> None:
    assert len(in_torch["devices"]) == 18
    assert set(in_torch["devices"].values()) == {"cpu"}
    assert in_torch["dtype"] == "torch.float64"
    assert in_torch["values"] == [3.0, 3.0]


def test_calls_for_another_device_are_unchanged(in_torch: dict[str, Any]) -> None:
    assert in_torch["plain"] == ["cpu", "cpu"]
    assert in_torch["meta"] == "meta"


def test_tensor_types_are_those_that_optimizers_compare(
    in_torch: dict[str, Any],
) -> None:
    assert in_torch["types"] == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor"]
    assert in_torch["type_casts"] == [True, True]


def test_streams_are_a_class_that_packages_can_subclass(in_torch: dict[str, Any]) -> None:
    assert in_torch["streams"]


def test_memory_is_not_pinned_without_a_gpu(in_torch: dict[str, Any]) -> None:
    assert not in_torch["pinned"]


def test_cudas_random_state_is_that_of_the_cpu(in_torch: dict[str, Any]) -> None:
    assert in_torch["random_state"]


MEGATRON = """
import json, torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megapack import launch
from megapack.layout import Layout
from megapack.job.gpt import initialize_parallel

results = {"device": launch.start("cpu").type}
initialize_parallel(Layout(), 1)
tracker = get_cuda_rng_tracker()
before = torch.get_rng_state()
with tracker.fork():
    forked = torch.rand(4)
results["fork_restores"] = torch.equal(before, torch.get_rng_state())
outside = torch.rand(4)
with tracker.fork():
    results["fork_goes_on"] = not torch.equal(forked, torch.rand(4))
results["fork_is_apart"] = not torch.equal(forked, outside)

launch.stop()
results["stopped"] = not torch.distributed.is_initialized()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def in_megatron() -> dict[str, Any]:
    """Megatron's random states, in a job of one rank."""
    return child(MEGATRON)


def test_a_job_of_one_needs_no_port(in_megatron: dict[str, Any]) -> None:
    assert in_megatron["device"] == "cpu"
    assert in_megatron["stopped"]


def test_megatrons_random_states_fork(in_megatron: dict[str, Any]) -> None:
    assert in_megatron["fork_restores"]
    assert in_megatron["fork_goes_on"]
    assert in_megatron["fork_is_apart"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_device_cuda_never_falls_back_to_the_cpu() -> None:
    with pytest.raises(ConfigError, match="finds no CUDA device; set device=cpu"):
        launch.start("cuda")
    assert not cpu.enabled()


def test_torch_can_compile_afterwards() -> None:
    """Its table of rules, by function, is made at the first import of `torch._dynamo`."""
    code = """
import json
from megapack import cpu
cpu.enable()
import torch._dynamo.trace_rules
print(json.dumps({"rules": len(torch._dynamo.trace_rules.get_torch_obj_rule_map())}))
"""
    assert child(code)["rules"] > 1000
