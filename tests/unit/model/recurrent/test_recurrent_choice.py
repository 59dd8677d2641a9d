"""The kernels of recurrent layers on a machine, and the line that tells them."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from megapack.model.attention.choice import find_kernels
from megapack.model.recurrent import choice
from megapack.model.recurrent.choice import (
    delta_rule_kernels,
    recurrent_kernels,
    state_space_kernels,
)
from megapack.model.recurrent.convolution import dao_convolution, fla_convolution
from megapack.model.recurrent.delta_rule import fla_delta_rule, torch_delta_rule
from megapack.model.recurrent.state_space import mamba_state_space, torch_state_space

pytestmark = pytest.mark.unit

Versions = dict[str, str]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Versions:
    """Packages of a machine with a GPU; a test adds some."""
    installed: Versions = {}

    def version(package: str) -> str:
        if package not in installed:
            raise metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(choice.metadata, "version", version)
    monkeypatch.setattr(choice.cpu, "uses_cuda", lambda: True)
    monkeypatch.setattr(choice.torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    installed["triton"] = "3.7.1"
    return installed


def test_a_gpu_takes_the_fast_kernels_where_they_are_installed(versions: Versions) -> None:
    versions.update({"fla-core": "0.6.0", "mamba-ssm": "2.3.2.post1", "causal-conv1d": "1.7.0"})
    delta = delta_rule_kernels()
    assert (delta.convolve, delta.scan) == (fla_convolution, fla_delta_rule)
    space = state_space_kernels()
    assert (space.convolve, space.scan) == (dao_convolution, mamba_state_space)
    assert recurrent_kernels("GEM-*-") == (
        "gated delta nets fla-core; Mamba-2 mamba-ssm and causal-conv1d"
    )


def test_without_them_the_line_says_why_a_gpu_is_slow(versions: Versions) -> None:
    versions["mamba-ssm"] = "2.3.2"
    assert delta_rule_kernels().scan is torch_delta_rule
    assert state_space_kernels().scan is torch_state_space
    missing = "is not installed"
    assert recurrent_kernels("G-") == (
        f"gated delta nets torch, which is slow: the package fla-core {missing}"
    )
    assert recurrent_kernels("M-") == (
        f"Mamba-2 torch, which is slow: the package causal-conv1d {missing}"
    )


def test_a_release_that_would_read_wrong_heads_is_passed_over(versions: Versions) -> None:
    versions["fla-core"] = "0.4.2"
    assert delta_rule_kernels().scan is torch_delta_rule
    assert "fla-core is 0.4.2, packed rows need 0.5.0" in recurrent_kernels("G")


@pytest.mark.parametrize("triton", ["3.4.0", "3.6.0", "3.7.0"])
def test_a_triton_whose_gradients_are_wrong_on_hopper_is_passed_over(
    triton: str, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions.update({"fla-core": "0.6.0", "triton": triton})
    assert delta_rule_kernels().scan is torch_delta_rule
    assert recurrent_kernels("G") == (
        f"gated delta nets torch, which is slow: its backward is wrong with Triton {triton} on "
        "Hopper; install tilelang, or Triton 3.7.1 or later"
    )
    monkeypatch.setattr(choice.torch.cuda, "get_device_capability", lambda: (8, 0))
    assert delta_rule_kernels().scan is fla_delta_rule
    monkeypatch.setattr(choice.torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(choice, "find_spec", lambda name: name == "tilelang")
    assert delta_rule_kernels().scan is fla_delta_rule


def test_a_cpu_takes_torchs_whatever_is_installed(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions["fla-core"] = "0.6.0"
    monkeypatch.setattr(choice.cpu, "uses_cuda", lambda: False)
    assert delta_rule_kernels().scan is torch_delta_rule
    assert recurrent_kernels("G*-") == "gated delta nets torch"


def test_a_run_tells_them_for_models_that_have_such_layers() -> None:
    assert str(find_kernels("sdpa", layer_pattern="M-*-")).endswith("; Mamba-2 torch")
    for pattern in (None, "*-*E"):
        kernels = find_kernels("sdpa", layer_pattern=pattern)
        assert "torch, which" not in str(kernels)
        assert "torch" in str(kernels)
        assert "Mamba" not in str(kernels)


def test_the_extra_asks_for_these_versions(repo_root: Path) -> None:
    setup = (repo_root / "setup.py").read_text()
    for package, least in choice._LEAST_VERSIONS.items():
        assert f'"{package}>={least}"' in setup
