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
        monkeypatch.setattr(choice, "has_windows", lambda: True)
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
        "te": "the package transformer-engine is not installed (megapack[te])"
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
    with pytest.raises(ConfigError, match=r"pip install megapack\[te-cpu\]"):
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
    ("attention", "dtype", "way"),
    [
        ("varlen", "bf16", "keys gathered per sample"),
        ("sdpa", "fp32", "keys gathered per sample"),
    ],
)
def test_the_log_says_how_prefixes_are_shared(
    gpu: Machine, attention: Any, dtype: Any, way: str
) -> None:
    assert "shared prefixes" not in str(find_kernels(attention, dtype))
    found = find_kernels(attention, dtype, shares_prefixes=True)
    assert f"; shared prefixes: {way}" in str(found)


def test_calls_are_merged_on_a_cpu() -> None:
    found = str(find_kernels("auto", "fp32", shares_prefixes=True))
    assert "attention sdpa" in found
    assert "; shared prefixes: one call per prefix, merged; not te: the device is not" in found


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ({"windows": (128, None)}, "windows"),
        ({"softmax_type": "learnable"}, "sinks"),
        ({"windows": (128,), "softmax_type": "learnable"}, "windows and sinks"),
    ],
)
def test_transformer_engine_has_windows_and_sinks_in_plain_rows_only(
    gpu: Machine, kind: dict[str, Any], what: str
) -> None:
    gpu.transformer_engine(imports=True)
    sizes = AttentionSizes(heads=8, groups=2, head_width=64, **kind)
    assert choose_attention("auto", "bf16", sizes) == "te"
    assert choose_attention("auto", "bf16", sizes, shares_prefixes=True) == "varlen"
    over_ranks = dataclasses.replace(sizes, cp=2)
    assert choose_attention("auto", "bf16", over_ranks) == "varlen"
    wide = dataclasses.replace(sizes, most_cp=4)
    with pytest.raises(ConfigError, match=rf"not run {what} of attention with .*\(cp=4\), varlen"):
        choose_attention("te", "bf16", wide)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("is_capped", "it does not cap scores"), ("is_sparse", "it has no sparse attention")],
)
def test_torch_runs_what_no_fused_kernel_has(gpu: Machine, kind: str, reason: str) -> None:
    gpu.transformer_engine(imports=True)
    sizes = AttentionSizes(heads=8, groups=2, head_width=64, **{kind: True})
    assert choose_attention("auto", "bf16", sizes) == "sdpa"
    reasons = passed_over("sdpa", "bf16", sizes)
    assert reasons.keys() == {"te", "varlen"}
    assert all(reason in why for why in reasons.values())


def test_transformer_engine_shares_no_prefixes_with_context_parallelism(gpu: Machine) -> None:
    gpu.transformer_engine(imports=True)
    sizes = AttentionSizes(heads=8, groups=2, head_width=64, cp=2)
    assert choose_attention("auto", "bf16", sizes) == "te"
    assert choose_attention("auto", "bf16", sizes, shares_prefixes=True) == "varlen"
    found = str(find_kernels("auto", "bf16", sizes, shares_prefixes=True))
    assert "not te: it has no shared prefixes with context parallelism (cp=2)" in found
    with pytest.raises(ConfigError, match=r"model.attention=te .* \(cp=2\).*share_prefixes=off"):
        choose_attention("te", "fp32", sizes, shares_prefixes=True)
    alone = AttentionSizes(heads=8, groups=2, head_width=64)
    assert choose_attention("auto", "bf16", alone, shares_prefixes=True) == "te"
