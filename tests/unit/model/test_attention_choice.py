"""The kernels chosen on a machine, and the reasons against the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megapack.errors import ConfigError
from megapack.model.attention import choice
from megapack.model.attention.choice import choose_attention, find_kernels, passed_over
from megapack.model.attention.te_backend import AttentionSizes

pytestmark = pytest.mark.unit

VARLEN = "torch.nn.attention.varlen"


class Machine:
    """A machine whose properties a test can set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.modules = {VARLEN}
        monkeypatch.setattr(choice.cpu, "uses_cuda", lambda: True)
        monkeypatch.setattr(
            choice.importlib.util, "find_spec", lambda name: name in self.modules or None
        )
        # Whatever torch is installed.
        monkeypatch.setattr(choice, "has_varlen", lambda: VARLEN in self.modules)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        self.capability((9, 0))

    def capability(self, version: tuple[int, int]) -> None:
        self._patch.setattr(torch.cuda, "get_device_capability", lambda: version)

    def transformer_engine(self, *, imports: bool) -> None:
        self.modules.add("transformer_engine")
        from megatron.core.extensions import transformer_engine

        self._patch.setattr(transformer_engine, "HAVE_TE", imports)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A Hopper GPU without Transformer Engine."""
    return Machine(monkeypatch)


def test_transformer_engine_comes_first(gpu: Machine) -> None:
    gpu.transformer_engine(imports=True)
    assert choose_attention("auto") == "te"
    assert passed_over("te") == {}


def test_varlen_comes_second(gpu: Machine) -> None:
    assert choose_attention("auto") == "varlen"
    assert passed_over("varlen") == {
        "te": "the package transformer-engine[core_cu13,pytorch] is not installed"
    }


def test_a_broken_transformer_engine_is_passed_over(gpu: Machine) -> None:
    gpu.transformer_engine(imports=False)
    assert choose_attention("auto") == "varlen"
    assert "installed and does not import" in passed_over("varlen")["te"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda gpu: gpu.modules.clear(), "2.11 and later have"),
        (lambda gpu: gpu.capability((7, 5)), "compute capability 7.5, it needs 8.0"),
    ],
)
def test_sdpa_comes_last(gpu: Machine, change: Any, reason: str) -> None:
    change(gpu)
    assert choose_attention("auto") == "sdpa"
    assert reason in passed_over("sdpa")["varlen"]
    with pytest.raises(ConfigError, match=f"model.attention=varlen cannot run here: .*{reason}"):
        choose_attention("varlen")


def test_fp32_is_sdpa_unless_te_is_forced(gpu: Machine) -> None:
    gpu.transformer_engine(imports=True)
    assert choose_attention("auto", "fp32") == "sdpa"
    assert set(passed_over("sdpa", "fp32")) == {"te", "varlen"}
    assert choose_attention("te", "fp32") == "te"
    with pytest.raises(ConfigError, match=r"take bf16, model.dtype is fp32"):
        choose_attention("varlen", "fp32")


@pytest.mark.parametrize("forced", ["te", "varlen"])
def test_without_cuda_only_sdpa_runs(monkeypatch: pytest.MonkeyPatch, forced: Any) -> None:
    monkeypatch.setattr(choice.cpu, "uses_cuda", lambda: False)
    assert choose_attention("auto") == choose_attention("sdpa") == "sdpa"
    with pytest.raises(ConfigError, match=f"{forced} cannot run here: the device is not CUDA"):
        choose_attention(forced)


def test_without_cuda_te_runs_by_its_name_if_its_python_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice.cpu, "uses_cuda", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install transformer-engine einops"):
        choose_attention("te")
    monkeypatch.setattr(choice.cpu, "runs_te", lambda: True)
    monkeypatch.setattr(choice, "_te_missing", lambda: None)
    assert choose_attention("te") == "te"
    assert choose_attention("auto") == "sdpa"


def test_kernels_print_as_one_line_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice.cpu, "uses_cuda", lambda: False)
    found = find_kernels("auto", "fp32")
    assert found.attention == "sdpa"
    text = str(found)
    assert "\n" not in text
    assert text.startswith("attention sdpa, norms torch, Adam ")
    assert text.endswith(
        "unfused rotary embeddings; not te: the device is not CUDA; not varlen: the device is not "
        "CUDA"
    )
    assert str(find_kernels("sdpa", "fp32")).endswith("unfused rotary embeddings")


def test_the_optimizer_is_the_one_megatron_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import optimizer

    fused = type("FusedAdam", (), {"__module__": "apex.optimizers.fused_adam"})
    monkeypatch.setattr(optimizer, "Adam", fused)
    assert "Adam apex" in str(find_kernels("sdpa"))
    fused.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"
    assert "Adam te" in str(find_kernels("sdpa"))
    monkeypatch.setattr(optimizer, "Adam", torch.optim.AdamW)
    assert "Adam torch" in str(find_kernels("sdpa"))


def test_torch_runs_what_no_fused_kernel_has(gpu: Machine) -> None:
    gpu.transformer_engine(imports=True)
    sizes = AttentionSizes(heads=8, groups=2, head_width=64)
    sparse = dataclasses.replace(sizes, is_sparse=True)
    assert choose_attention("auto", "bf16", sparse) == "sdpa"
    reasons = passed_over("sdpa", "bf16", sparse)
    assert reasons.keys() == {"te", "varlen"}
    assert all("it has no sparse attention" in why for why in reasons.values())
    # Layers with capped scores have torch's attention, and Transformer Engine's other parts.
    capped = dataclasses.replace(sizes, is_capped=True)
    assert choose_attention("auto", "bf16", capped) == "te"
    with pytest.raises(ConfigError, match="attention=varlen cannot run here: it does not cap"):
        choose_attention("varlen", "bf16", capped)
