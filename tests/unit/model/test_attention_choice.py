"""The kernels chosen on a machine, and the reasons against the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megapack.errors import ConfigError
from megapack.model.attention import choice, varlen
from megapack.model.attention.choice import choose_attention, find_kernels, passed_over
from megapack.model.attention.te_backend import AttentionSizes

pytestmark = pytest.mark.unit


class Machine:
    """A machine whose properties a test can set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.modules = {"torch.nn.attention.varlen"}
        monkeypatch.setattr(choice.cpu, "uses_cuda", lambda: True)
        monkeypatch.setattr(
            choice.importlib.util, "find_spec", lambda name: name in self.modules or None
        )
        # Whatever torch is installed: windows came with 2.11.
        monkeypatch.setattr(varlen, "varlen_kernel", lambda: None)
        monkeypatch.setattr(varlen, "_parameters", lambda kernel: {"window_size": None})
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
        (lambda gpu: gpu.modules.clear(), "2.10 and later have"),
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
    assert (found.attention, found.norm) == ("sdpa", "torch")
    assert not found.rope_fusion
    text = str(found)
    assert "\n" not in text
    assert text.startswith(f"attention sdpa, norms torch, Adam {found.optimizer}, gradient norm ")
    assert text.endswith("not te: the device is not CUDA; not varlen: the device is not CUDA")
    assert find_kernels("sdpa", "fp32").passed_over == {}


def test_the_optimizer_is_the_one_megatron_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import optimizer

    fused = type("FusedAdam", (), {"__module__": "apex.optimizers.fused_adam"})
    monkeypatch.setattr(optimizer, "Adam", fused)
    assert find_kernels("sdpa").optimizer == "apex"
    fused.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"
    assert find_kernels("sdpa").optimizer == "te"
    monkeypatch.setattr(optimizer, "Adam", torch.optim.AdamW)
    assert find_kernels("sdpa").optimizer == "torch"


@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        ({}, "(varlen for shared prefixes and cp=2)"),
        ({"cp": 1}, None),
        ({"cp": 1, "most_cp": 4}, "(varlen for shared prefixes and cp=4)"),
        (
            {"windows": (128,), "cp": 1},
            "(varlen for windows and shared prefixes)",
        ),
        (
            {"windows": (None, 128)},
            "(varlen for shared prefixes and cp=2; windows and cp=2; windows and shared prefixes "
            "and cp=2)",
        ),
        ({"softmax_type": "learnable"}, "(varlen for sinks and cp=2; sinks and shared prefixes"),
        ({"softmax_type": "learnable", "cp_comm_type": "a2a"}, "(varlen for sinks and shared"),
        ({"windows": (128,), "head_width": 20}, "(sdpa for windows and cp=2"),
    ],
)
def test_rows_that_transformer_engine_does_not_run_have_another_kernel(
    gpu: Machine, kind: dict[str, Any], ours: str | None
) -> None:
    gpu.transformer_engine(imports=True)
    sizes = AttentionSizes(**{"heads": 8, "groups": 2, "head_width": 64, "cp": 2, **kind})
    assert choose_attention("auto", "bf16", sizes) == "te"
    found = str(find_kernels("auto", "bf16", sizes, shares_prefixes=True))
    assert found.startswith("attention te, norms te" if ours is None else f"attention te {ours}")


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
    assert str(find_kernels("auto", "bf16", capped)).startswith("attention te (sdpa for capped")
    with pytest.raises(ConfigError, match="attention=varlen cannot run here: it does not cap"):
        choose_attention("varlen", "bf16", capped)
