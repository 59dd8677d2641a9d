"""Transformer Engine is asked which attention it would run, in the words of its version."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from megapack.doctor.probes import run_probe
from megapack.errors import ConfigError
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt.build import attention_sizes
from megapack.layout import Layout
from megapack.model.attention import te_backend
from megapack.model.attention.choice import choose_attention, find_kernels, passed_over
from megapack.model.attention.te_backend import AttentionSizes
from tests.unit.model.test_attention_choice import Machine

pytestmark = pytest.mark.unit

SIZES = AttentionSizes(heads=16, groups=4, head_width=128, cp=2)

# Fields of AttentionParams in Transformer Engine 2.9; 2.20 has those below as well.
FIELDS_2_9 = (
    *("qkv_type", "qkv_dtype", "qkv_layout", "batch_size", "num_heads", "num_gqa_groups"),
    *("max_seqlen_q", "max_seqlen_kv", "head_dim_qk", "head_dim_v", "attn_mask_type"),
    *("window_size", "alibi_slopes_shape", "core_attention_bias_type"),
    *("core_attention_bias_shape", "core_attention_bias_requires_grad", "pad_between_seqs"),
    *("attention_dropout", "context_parallel", "cp_comm_type", "deterministic", "is_training"),
    *("fp8", "fp8_meta", "inference_params", "softmax_type", "return_max_logit"),
)
FIELDS_2_20 = (
    *FIELDS_2_9,
    *("bottom_right_diagonal", "cp_size", "cuda_graph", "num_splits", "fp8_output"),
    *("checkpoint_core_attention", "has_score_mod", "has_score_mod_bprop"),
)
FLASH = (True, "2.8.3", False, None, True, [True, True, True])
FUSED = (False, None, True, 1, True, [False, True, True])
UNFUSED = (False, None, False, None, True, [False, False, True])
MODULE = "transformer_engine.pytorch.attention.dot_product_attention"


class Engine:
    """Stands in for Transformer Engine's `dot_product_attention.utils`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.asked: list[Any] = []
        parts = MODULE.split(".")
        self.modules = {
            ".".join(parts[: n + 1]): ModuleType(".".join(parts[: n + 1]))
            for n in range(len(parts))
        }
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def answers(self, answer: Any, fields: tuple[str, ...] = FIELDS_2_9) -> None:
        te_backend.te_backend.cache_clear()
        utils = ModuleType("utils")
        params = dataclasses.make_dataclass("AttentionParams", [(n, Any, None) for n in fields])

        def get_attention_backend(attention_params: Any = None) -> Any:
            self.asked.append(attention_params)
            return answer(attention_params) if callable(answer) else answer

        utils.__dict__.update(AttentionParams=params, get_attention_backend=get_attention_backend)
        self._patch.setattr(self.modules[MODULE], "utils", utils, raising=False)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An importable Transformer Engine on a Hopper GPU."""
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    Machine(monkeypatch).transformer_engine(imports=True)
    yield Engine(monkeypatch)
    te_backend.te_backend.cache_clear()


@pytest.mark.parametrize("fields", [FIELDS_2_9, FIELDS_2_20], ids=["2.9", "2.20"])
def test_it_is_asked_for_the_models_attention_on_packed_rows(
    engine: Engine, fields: tuple[str, ...]
) -> None:
    engine.answers(FUSED, fields)
    assert te_backend.te_backend(SIZES) == "fused"
    (asked,) = engine.asked
    wanted = {
        "qkv_dtype": torch.bfloat16,
        "qkv_layout": "thd_thd_thd",
        "num_heads": 16,
        "num_gqa_groups": 4,
        "head_dim_qk": 128,
        "attn_mask_type": "padding_causal",
        "context_parallel": True,
        "deterministic": False,
        "is_training": True,
    }
    assert {name: getattr(asked, name) for name in wanted} == wanted
    if "cp_size" in fields:
        assert (asked.cp_size, asked.bottom_right_diagonal) == (2, False)


@pytest.mark.parametrize("fields", [FIELDS_2_9, FIELDS_2_20], ids=["2.9", "2.20"])
@pytest.mark.parametrize(("answer", "backend"), [(FLASH, "flash"), (FUSED, "fused")])
def test_with_a_packed_kernel_it_is_chosen(
    engine: Engine, fields: tuple[str, ...], answer: Any, backend: str
) -> None:
    engine.answers(answer, fields)
    assert te_backend.te_backend(SIZES) == backend
    assert choose_attention("auto", "bf16", SIZES) == "te"
    assert "not te" not in str(find_kernels("auto", "bf16", SIZES))


def test_unfused_attention_is_passed_over_with_a_reason(engine: Engine) -> None:
    engine.answers(UNFUSED)
    assert choose_attention("auto", "bf16", SIZES) == "varlen"
    reason = passed_over("varlen", "bf16", SIZES)["te"]
    assert "unfused attention for 16 heads (4 of keys) of 128 channels, cp=2" in reason
    assert "install flash-attn 2, or a newer cuDNN" in reason
    assert f"not te: {reason}" in str(find_kernels("auto", "bf16", SIZES))
    with pytest.raises(ConfigError, match=r"attention=te cannot run here: .*only unfused"):
        choose_attention("te", "bf16", SIZES)
    # fp32 has no fused kernel; chosen by name, unfused attention is what was asked for.
    assert choose_attention("te", "fp32", SIZES) == "te"


def test_a_deterministic_backward_of_packed_rows_is_not_cudnns_on_hopper(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    engine.answers(FUSED)
    assert choose_attention("auto", "bf16", SIZES) == "varlen"
    assert "128 GiB" in passed_over("varlen", "bf16", SIZES)["te"]
    with pytest.raises(ConfigError, match=r"NVTE_ALLOW_NONDETERMINISTIC_ALGO=0.*flash-attn 2"):
        choose_attention("te", "bf16", SIZES)
    assert all(asked.deterministic for asked in engine.asked)
    # flash-attn 2 has one, and so has cuDNN on Blackwell.
    engine.answers(FLASH)
    assert choose_attention("auto", "bf16", SIZES) == "te"
    engine.answers(FUSED)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert choose_attention("auto", "bf16", SIZES) == "te"


@pytest.mark.parametrize(
    ("answer", "found", "words"),
    [
        (FUSED, "te in bf16 for 32 heads (8 of keys) of 128 channels, cp=1", None),
        (UNFUSED, "varlen in bf16 for 32 heads", "passed over: it has only unfused attention"),
    ],
)
def test_doctor_reports_a_gpu_without_a_packed_kernel(
    engine: Engine, answer: Any, found: str, words: str | None
) -> None:
    engine.answers(answer)
    diagnosis = run_probe("attention")
    assert diagnosis.found.startswith(found)
    assert diagnosis.faults == []
    assert len(diagnosis.notes) == (words is not None)
    assert words is None or words in diagnosis.notes[0]


@pytest.mark.parametrize("answer", [FLASH[:5], lambda params: params.no_such_field])
def test_a_version_that_cannot_be_asked_is_left_to_choose(engine: Engine, answer: Any) -> None:
    engine.answers(answer)
    assert te_backend.te_backend(SIZES) is None
    assert choose_attention("auto", "bf16", SIZES) == "te"


def test_it_is_asked_for_each_kind_of_layers(engine: Engine) -> None:
    engine.answers(lambda asked: UNFUSED if asked.window_size == (127, 0) else FUSED)
    sizes = AttentionSizes(heads=64, groups=8, head_width=64)
    assert choose_attention("auto", "bf16", sizes) == "te"
    windows = dataclasses.replace(sizes, windows=(128, None))
    assert choose_attention("auto", "bf16", windows) == "varlen"
    assert "windows of 128" in passed_over("varlen", "bf16", windows)["te"]
    engine.answers(lambda asked: UNFUSED if asked.softmax_type == "learnable" else FUSED)
    sinks = dataclasses.replace(windows, softmax_type="learnable")
    assert choose_attention("auto", "bf16", sinks) == "te"
    assert not any(te_backend.te_runs(kind) for kind in sinks.kinds)
    engine.asked.clear()
    engine.answers(FUSED, FIELDS_2_20)
    assert choose_attention("auto", "bf16", sinks) == "te"
    assert all(te_backend.te_runs(kind) for kind in sinks.kinds)
    assert {asked.softmax_type for asked in engine.asked} == {"learnable"}
    assert {asked.window_size for asked in engine.asked} == {(127, 0), (-1, 0)}


def test_heads_of_another_width_are_asked_for_up_to_that_of_fused_attention(
    engine: Engine,
) -> None:
    """Wider ones run in torch's SDPA beside Transformer Engine's others."""
    engine.answers(FUSED)
    keys: dict[str, Any] = {"kv_channels": 64, "local_rotary_base": 1000, "rotary_pattern": "LG"}
    for width, asked in ((128, {64, 128}), (512, {64})):
        engine.asked.clear()
        te_backend.te_backend.cache_clear()
        model = ModelConfig(num_layers=2, global_kv_channels=width, global_query_groups=1, **keys)
        sizes = attention_sizes(model, Layout(tp=2), has_wide_rows=True)
        assert choose_attention("auto", "bf16", sizes) == "te"
        assert {question.head_dim_qk for question in engine.asked} == asked
    every = AttentionSizes(heads=8, groups=8, head_width=512)
    engine.answers(UNFUSED)
    assert choose_attention("auto", "bf16", every) == "sdpa"
    assert "multiples of 8 up to 256" in passed_over("sdpa", "bf16", every)["varlen"]


@pytest.mark.parametrize(
    ("changes", "layout", "sizes"),
    [
        ({}, Layout(tp=2, cp=2), AttentionSizes(heads=4, groups=4, head_width=8, cp=2)),
        (
            {"attention_window": 9, "attention_window_pattern": "LG", "attention_sinks": True},
            Layout(),
            AttentionSizes(
                heads=8, groups=8, head_width=8, windows=(9, None), softmax_type="learnable"
            ),
        ),
        (
            {"num_query_groups": 2, "kv_channels": 64},
            Layout(tp=2),
            AttentionSizes(heads=4, groups=1, head_width=64),
        ),
        (
            {
                **{"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16},
                "v_head_dim": 20,
            },
            Layout(tp=2, sequence_parallel=True),
            AttentionSizes(heads=4, groups=4, head_width=40, value_width=20),
        ),
    ],
)
def test_sizes_are_those_of_one_tensor_parallel_rank(
    changes: dict[str, Any], layout: Layout, sizes: AttentionSizes
) -> None:
    model = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=8, **changes)
    assert attention_sizes(model, layout) == sizes


def test_the_fused_rotary_kernel_is_used_with_every_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    kernel: Callable[..., Any] = lambda *args: None  # noqa: E731
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", kernel)
    monkeypatch.setattr("megapack.cpu.uses_cuda", lambda: True)
    assert " fused rotary" in str(find_kernels("sdpa", "fp32"))
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", None)
    assert " unfused rotary" in str(find_kernels("sdpa", "fp32"))


@pytest.mark.parametrize("fields", [FIELDS_2_9, FIELDS_2_20], ids=["2.9", "2.20"])
def test_it_is_asked_for_more_keys_than_queries(engine: Engine, fields: tuple[str, ...]) -> None:
    engine.answers(
        lambda asked: UNFUSED if asked.attn_mask_type.endswith("bottom_right") else FUSED, fields
    )
    sizes = dataclasses.replace(SIZES, cp=1)
    assert choose_attention("auto", "bf16", sizes) == "te"
    assert te_backend.te_runs(sizes)
    assert not te_backend.te_runs(sizes, more_keys=True, dtype=torch.float16)
    asked = engine.asked[-1]
    assert asked.attn_mask_type == "padding_causal_bottom_right"
    assert asked.qkv_dtype == torch.float16
    assert getattr(asked, "bottom_right_diagonal", True)


@pytest.mark.parametrize(
    ("changes", "more_keys", "runs"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"cp": 1}, True, True),
        ({"cp": 1, "windows": (9,)}, False, True),
        ({"cp": 1, "windows": (9,)}, True, False),
        ({"cp": 1, "softmax_type": "learnable"}, False, True),
        ({"cp": 1, "softmax_type": "learnable"}, True, False),
        ({"windows": (9,)}, False, False),
        ({"windows": (9,), "cp_comm_type": "a2a"}, False, True),
        ({"windows": (9,), "cp_comm_type": "all_gather"}, False, True),
        ({"softmax_type": "learnable"}, False, False),
        ({"softmax_type": "learnable", "cp_comm_type": "all_gather"}, False, False),
        ({"softmax_type": "learnable", "cp_comm_type": "a2a"}, False, True),
        ({"cp": 1, "is_capped": True}, False, False),
    ],
)
def test_what_its_releases_refuse_is_not_given_to_it(
    engine: Engine, changes: dict[str, Any], more_keys: bool, runs: bool
) -> None:
    engine.answers(FUSED)
    sizes = dataclasses.replace(SIZES, **changes)
    assert te_backend.te_runs(sizes, more_keys=more_keys) == runs
    assert all(asked.cp_comm_type == sizes.cp_comm_type for asked in engine.asked)
