"""Variables that `megapack train` sets for GPUs; a user's own values stay."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from megapack import cli
from megapack.base import gpu_environment
from megapack.base.gpu_environment import (
    compute_capability,
    missing_variables,
)

pytestmark = pytest.mark.unit

HOPPER = (9, 0)
BLACKWELL = (10, 0)
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
BOTH = {**ALLOCATOR, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize(
    ("environment", "tp", "cp", "capability", "expected"),
    [
        ({}, 1, 1, HOPPER, ALLOCATOR),
        ({}, 2, 1, HOPPER, BOTH),
        ({}, 1, 2, (8, 0), BOTH),
        ({}, 8, 1, BLACKWELL, ALLOCATOR),
        ({}, 8, 1, None, ALLOCATOR),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, 2, 1, HOPPER, ALLOCATOR),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, 1, 1, HOPPER, {}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:9"}, 1, 1, HOPPER, {}),
    ],
)
def test_missing_variables(
    environment: dict[str, str], tp: int, cp: int, capability: Any, expected: dict[str, str]
) -> None:
    assert missing_variables(environment, tp=tp, cp=cp, capability=capability) == expected


class Nvml:
    """NVML of a machine with one Hopper GPU, or with none."""

    def __init__(self, *, has_gpu: bool = True) -> None:
        self._status = 0 if has_gpu else 6
        self.num_shutdowns = 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        self.num_shutdowns += 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        return self._status

    def nvmlDeviceGetCudaComputeCapability(self, device: Any, major: Any, minor: Any) -> int:
        major._obj.value = 9
        minor._obj.value = 0
        return 0


@pytest.mark.parametrize(("has_gpu", "expected"), [(True, HOPPER), (False, None)])
def test_the_capability_comes_from_nvml(
    has_gpu: bool, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml(has_gpu=has_gpu)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    assert compute_capability() == expected
    assert nvml.num_shutdowns == 1


def test_without_nvml_the_capability_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert compute_capability() is None


@pytest.mark.parametrize(("device", "num_calls"), [("cuda", 1), ("cpu", 0)])
def test_train_sets_them_for_cuda_before_torch(
    device: str, num_calls: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[dict[str, int]] = []

    class Stopped(Exception):
        pass

    def quiet() -> None:
        raise Stopped

    monkeypatch.setattr(
        gpu_environment, "set_missing_variables", lambda **sizes: given.append(sizes)
    )
    monkeypatch.setattr("megapack.base.known_warnings.quiet_known_warnings", quiet)
    config = "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
    with pytest.raises(Stopped):
        cli.main(["train", config, f"device={device}", f"runs_dir={tmp_path}"])
    assert given == [{"tp": 1, "cp": 1}] * num_calls
