"""Settings with which Megatron goes wrong are refused, with a message that says what to set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from packaging.version import Version

from megapack.dp_schedule import build_dp_schedule
from megapack.errors import ConfigError, MegapackError
from megapack.job.gpt.build import without_cuda_graphs
from megapack.layout import Layout
from megapack.model.attention.sdpa import PackedSDPA
from megapack.model.parameters import mark_experts
from megapack.policy import Policy
from megapack.schedule import checks
from megapack.schedule.checks import (
    check_chunks,
    check_config,
    check_counts,
    check_cp_comm,
    check_expert_gradients,
    check_layout,
    check_planned_rows,
    check_reduction,
)

pytestmark = pytest.mark.unit

INTERLEAVED = Layout(pp=2, vpp=2)


def config(layout: Layout = INTERLEAVED, **changes: Any) -> TransformerConfig:
    """A Megatron config that the adapter accepts, with some changes."""
    vpp = layout.vpp if layout.vpp > 1 else None
    made = TransformerConfig(
        num_layers=8,
        hidden_size=16,
        num_attention_heads=4,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_dtype=torch.float32,
        context_parallel_size=layout.cp,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sequence_parallel,
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        calculate_per_token_loss=True,
        **without_cuda_graphs(),
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


REFUSED: dict[str, tuple[Layout, dict[str, Any], str]] = {
    "sequence parallelism differs": (
        Layout(),
        {"sequence_parallel": True},
        r"sequence_parallel=True.*layout's sequence_parallel=False.*set both to the same value",
    ),
    "a loss divided by M": (
        Layout(),
        {"calculate_per_token_loss": False},
        r"calculate_per_token_loss is False.*set it to True",
    ),
    "interleaved with batched p2p": (
        INTERLEAVED,
        {"batch_p2p_comm": True},
        r"vpp=2 .*batch_p2p_comm=True.*set overlap_p2p_comm=True and batch_p2p_comm=False",
    ),
    "interleaved without overlap": (
        INTERLEAVED,
        {"overlap_p2p_comm": False},
        r"vpp=2 with overlap_p2p_comm=False.*set overlap_p2p_comm=True",
    ),
    "interleaved by a virtual size of 1": (
        Layout(pp=2),
        {"virtual_pipeline_model_parallel_size": 1},
        r"virtual_pipeline_model_parallel_size=1 .*set it to None if vpp=1",
    ),
    "context parallelism differs": (
        Layout(cp=2),
        {"context_parallel_size": 1},
        r"context_parallel_size=1 and the layout's cp=2 differ; set both to the same",
    ),
    "multi-token prediction with full recompute": (
        Layout(),
        {"mtp_num_layers": 1, "recompute_granularity": "full"},
        r"mtp_num_layers=1.*set recompute_granularity='selective' or None",
    ),
    "partial checkpoints": (
        Layout(),
        {"num_microbatches_with_partial_activation_checkpoints": 2},
        r"num_microbatches_with_partial_activation_checkpoints=2.*set it to None",
    ),
    "overlapped experts": (
        Layout(),
        {"overlap_moe_expert_parallel_comm": True},
        r"overlap_moe_expert_parallel_comm=True.*set it to False",
    ),
    "hybrid context parallelism": (
        Layout(),
        {"hybrid_context_parallel": True},
        r"hybrid_context_parallel=True.*set it to False",
    ),
    "weight gradients of experts in a stream of their own": (
        Layout(),
        {"overlap_dispatch_backward_with_experts_wgrad": True},
        r"overlap_dispatch_backward_with_experts_wgrad=True.*set it to False",
    ),
    "weights that are split over ranks": (
        Layout(),
        {"gtp_weight_remat_size": 2},
        r"gtp_weight_remat_size=2.*set it to 1",
    ),
    "further losses that leave the model alone": (
        Layout(),
        {"mtp_num_layers": 1, "mtp_detach_heads": True},
        r"mtp_detach_heads=True.*set it to False",
    ),
    "mixed hidden states": (
        Layout(),
        {"mtp_num_layers": 1, "mtp_hsm": True},
        r"mtp_hsm=True.*depend on the packing; set it to False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_setting_is_refused_with_what_to_set(name: str) -> None:
    layout, changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        check_config(config(layout, **changes), layout)
    assert isinstance(caught.value, MegapackError)
    assert "\n" not in str(caught.value)


def test_settings_without_what_they_belong_to_are_accepted() -> None:
    check_config(config(Layout(), mtp_detach_heads=True, mtp_hsm=True), Layout())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_moe_experts": 4, "moe_token_dispatcher_type": "allgather"},
            r"'allgather'.*set 'alltoall', or plan .*'uniform'\) or Policy\(row_shapes=1\)",
        ),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["mlp"]},
            r"cuda_graph_impl='transformer_engine'.*'none'.*Policy\(row_shapes=1\)",
        ),
    ],
)
def test_rows_of_different_lengths_are_refused_if_they_hang(
    changes: dict[str, Any], message: str
) -> None:
    for policy in (Policy(), Policy(row_shapes=2)):
        with pytest.raises(ConfigError, match=message):
            check_planned_rows(config(**changes), policy)
    check_planned_rows(config(**changes), Policy(row_shapes=1))


@pytest.mark.parametrize("impl", ["local", "transformer_engine", "full_iteration"])
@pytest.mark.parametrize(
    ("name", "scope", "captured"),
    [
        ("cuda_graph_scope", [], "whole layers"),
        ("cuda_graph_scope", "full", "whole layers"),
        ("cuda_graph_scope", "attn,mlp", "attn, mlp"),
        ("cuda_graph_scope", [SimpleNamespace(name="moe_router")], "moe_router"),
        ("cuda_graph_modules", [SimpleNamespace(name="attn")], "attn"),
    ],
)
def test_cuda_graphs_of_what_sees_samples_are_refused(
    impl: str, name: str, scope: Any, captured: str
) -> None:
    made = config(cuda_graph_impl=impl, **{name: scope})
    with pytest.raises(
        ConfigError, match=rf"'{impl}'\) of {captured}:.*set cuda_graph_impl='none'"
    ):
        check_config(made, INTERLEAVED)


@pytest.mark.parametrize("name", ["cuda_graph_scope", "cuda_graph_modules"])
def test_cuda_graphs_of_dense_mlps_are_accepted(name: str) -> None:
    made = config(cuda_graph_impl="transformer_engine", **{name: [SimpleNamespace(name="mlp")]})
    check_config(made, INTERLEAVED)


@pytest.mark.parametrize("name", ["cuda_graph_scope", "cuda_graph_modules"])
def test_local_cuda_graphs_of_dense_mlps_are_of_whole_layers(name: str) -> None:
    made = config(cuda_graph_impl="local", **{name: [SimpleNamespace(name="mlp")]})
    with pytest.raises(ConfigError, match=r"'local'.* of whole layers:.*'transformer_engine' to"):
        check_config(made, INTERLEAVED)


class TEDotProductAttention(torch.nn.Module):
    """Has the name of Megatron's wrapper of Transformer Engine."""


@pytest.mark.parametrize(
    ("version", "kind", "known"),
    [
        ("2.9.0", "a2a", "'p2p'"),
        ("2.9.0", ["p2p", "a2a"], "'p2p'"),
        ("2.11.0", "all_gather", "'p2p' or 'a2a'"),
        ("2.17.0", "all_gather", "'p2p' or 'a2a'"),
        ("2.20.2", "a2a+p2p", "'p2p' or 'all_gather' or 'a2a'"),
        ("2.20.2", ["p2p", "a2a+p2p"], "'p2p' or 'all_gather' or 'a2a'"),
        ("2.9.0", ["p2p", "p2p"], None),
        ("2.10.0", "a2a", None),
        ("2.18.0+abc", ["all_gather", "a2a"], None),
        ("2.9.0", None, None),
    ],
)
def test_ways_of_context_parallelism_by_version(
    version: str, kind: Any, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "get_te_version", lambda: Version(version))
    made = config(Layout(cp=2), cp_comm_type=kind)
    check_cp_comm([torch.nn.Linear(1, 1)], made)
    expected: Any = contextlib.nullcontext()
    if known is not None:
        expected = pytest.raises(ConfigError, match=f"Transformer Engine {version}.*set {known}$")
    with expected:
        check_cp_comm([torch.nn.Sequential(TEDotProductAttention())], made)
    without_cp = config(Layout(), cp_comm_type=kind)
    check_cp_comm([torch.nn.Sequential(TEDotProductAttention())], without_cp)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """Sizes of Megatron's process groups; tests change them."""
    sizes: dict[str, int | None] = {"data": 2, "tensor_model": 2, "pipeline_model": 4}
    sizes |= {"context": 1, "expert_model": 1, "expert_tensor": 1, "virtual_pipeline_model": None}

    def size_of(name: str) -> Callable[..., int]:
        return lambda *_, **__: sizes[name]

    for name in tuple(sizes):
        monkeypatch.setattr(parallel_state, f"get_{name}_parallel_world_size", size_of(name))
    return sizes


def test_megatron_must_know_the_virtual_stages(groups: dict[str, int | None]) -> None:
    with pytest.raises(ConfigError, match=r"is None, the layout has vpp=3"):
        check_layout(Layout(dp=2, tp=2, pp=4, vpp=3), 3, has_experts=False)
    groups["virtual_pipeline_model"] = 1
    with pytest.raises(ConfigError, match=r"is 1, the layout has vpp=1.*None if vpp=1"):
        check_layout(Layout(dp=2, tp=2, pp=4), 1, has_experts=False)


@pytest.mark.parametrize(
    ("group", "axis", "size"),
    [
        ("data", "dp", 4),
        ("tensor_model", "tp", 4),
        ("pipeline_model", "pp", 2),
        ("context", "cp", 2),
        ("expert_model", "ep", 2),
        ("expert_tensor", "etp", 2),
    ],
)
def test_a_layout_that_differs_from_the_groups_is_refused(
    groups: dict[str, int | None], group: str, axis: str, size: int
) -> None:
    layout = Layout(dp=2, tp=2, pp=4)
    groups[group] = size
    own = getattr(layout, axis)
    with pytest.raises(ConfigError, match=rf"has {axis}={own}.*{size}; set Layout\({axis}={size}"):
        check_layout(layout, 1, has_experts=True)


def test_the_model_needs_one_chunk_per_virtual_stage(groups: dict[str, int | None]) -> None:
    with pytest.raises(ConfigError, match=r"1 chunk\(s\).*vpp=2; build one chunk per virtual"):
        check_layout(Layout(dp=2, tp=2, pp=4, vpp=2), 1, has_experts=False)
    with pytest.raises(ConfigError, match=r"2 chunk\(s\).*vpp=1"):
        check_layout(Layout(dp=2, tp=2, pp=4), 2, has_experts=False)


class DotProductAttention(torch.nn.Module):
    """Has the name of Megatron's attention, which does not support packed rows."""


def chunk(*cores: torch.nn.Module) -> torch.nn.Module:
    layers = []
    for core in cores:
        layer = torch.nn.Module()
        layer.self_attention = torch.nn.Module()
        layer.self_attention.core_attention = core
        layers.append(layer)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(layers)
    return model


def packed() -> PackedSDPA:
    from megatron.core.transformer.enums import AttnMaskType

    settings = SimpleNamespace(attention_dropout=0.0, kv_channels=4, context_parallel_size=1)
    return PackedSDPA(settings, 1, AttnMaskType.causal, "self")


def test_the_error_names_a_layer_with_unpacked_attention() -> None:
    wrong = chunk(packed(), DotProductAttention())
    message = (
        r"layers.1.self_attention.core_attention is DotProductAttention.*megapack.job.gpt's local"
    )
    with pytest.raises(ConfigError, match=message):
        check_chunks([chunk(packed()), wrong])


def test_a_ddp_that_averages_gradients_is_refused() -> None:
    wrapped = chunk(packed())
    wrapped.buffers = [SimpleNamespace(gradient_scaling_factor=0.5)]  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"by 0.5; set it to True before wrapping"):
        check_chunks([wrapped])


def test_gradients_that_nothing_reduces_are_refused() -> None:
    bare = [chunk(packed())]
    made = config(Layout(dp=2))
    with pytest.raises(ConfigError, match=r"dp=2, cp=1, pp=1; wrap each chunk"):
        check_reduction(made, bare, Layout(dp=2))
    with pytest.raises(ConfigError, match=r"dp=1, cp=2, pp=1; wrap each chunk"):
        check_reduction(made, bare, Layout(cp=2))
    check_reduction(config(Layout()), bare, Layout())
    made.finalize_model_grads_func = print
    check_reduction(made, bare, Layout(dp=2))


REFUSED_EXPERTS: list[tuple[Layout, dict[str, Any], str]] = [
    (
        INTERLEAVED,
        {"moe_aux_loss_coeff": 0.1},
        r"'aux_loss' with moe_aux_loss_coeff=0.1.*depend on the packing; set 'seq_aux_loss'",
    ),
    (
        INTERLEAVED,
        {
            "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.2],
        },
        r"'global_aux_loss' with moe_aux_loss_coeff=0.2",
    ),
    (
        INTERLEAVED,
        {"moe_router_load_balancing_type": "sinkhorn"},
        "routes a token depending on its row",
    ),
    (
        INTERLEAVED,
        {"moe_router_load_balancing_type": "quantile_balancing"},
        "'quantile_balancing' routes a token depending on its row",
    ),
    (INTERLEAVED, {"moe_expert_capacity_factor": 1.5}, "set it to None"),
    (INTERLEAVED, {"moe_expert_rank_capacity_factor": 1.5}, "set it to None"),
    (INTERLEAVED, {"moe_enable_routing_replay": True}, "one micro-batch at a time"),
    (
        INTERLEAVED,
        {"moe_latent_size": 8, "moe_shared_expert_overlap": True},
        "moe_shared_expert_overlap=True is not supported: Megatron-Core does not train it",
    ),
    (Layout(tp=2), {}, r"tp=2 need sequence parallelism"),
]


@pytest.mark.parametrize(("layout", "changes", "message"), REFUSED_EXPERTS)
def test_expert_settings_that_depend_on_the_packing_are_refused(
    layout: Layout, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(config(layout, num_moe_experts=4, **changes), layout)
    check_config(config(layout, **changes), layout)


def test_the_config_must_split_experts_as_the_layout_does() -> None:
    layout = Layout(tp=2, sequence_parallel=True)
    wrong = config(layout, num_moe_experts=4, expert_tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"parallel_size=2 and the layout's etp=1 differ"):
        check_config(wrong, layout)
    check_config(wrong, replace(layout, etp=2))


def test_whole_experts_on_tensor_parallel_ranks_need_their_own_reduction() -> None:
    """Megatron-Core 0.16.1 marks experts only if ep > 1."""
    layout = Layout(tp=2, sequence_parallel=True)
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": torch.nn.Linear(2, 2)})})
    message = r"not add mlp.experts.weight's gradients.*tp=2, etp=1, ep=1; set etp=2 or ep > 1"
    with pytest.raises(ConfigError, match=message):
        check_expert_gradients([model], layout)
    check_expert_gradients([model], replace(layout, etp=2))
    mark_experts([model])
    check_expert_gradients([model], layout)


def test_pieces_are_refused_with_scales_that_ranks_agree_on() -> None:
    policy = Policy(split_samples="auto")
    plan = build_dp_schedule([5, 6], layout=Layout(dp=2), max_tokens_per_gpu=8, policy=policy)
    check_counts(plan, config())
    delayed = {"fp8": "hybrid", "fp8_recipe": "delayed"}
    with pytest.raises(ConfigError, match=r"fp8_recipe='delayed'.*set split_samples='off'"):
        check_counts(plan, config(**delayed))
    check_counts(plan, config(**delayed, tp_only_amax_red=True))


@pytest.mark.parametrize(
    ("recipe", "rows", "unit"),
    [
        ("delayed", False, 16),
        ("tensorwise", False, 16),
        ("mxfp8", True, 32),
        ("blockwise", True, 128),
    ],
)
def test_row_lengths_that_fp8_does_not_support_are_refused(
    recipe: str, rows: Any, unit: int
) -> None:
    layout = replace(INTERLEAVED, fp8=rows)
    made = config(layout, fp8="e4m3", fp8_recipe=recipe)
    with pytest.raises(ConfigError, match=rf"multiple of {unit} tokens per GPU.*set Layout\(fp8="):
        check_config(made, layout)
    for wide in ("blockwise", recipe if recipe == "mxfp8" else "blockwise"):
        check_config(made, replace(layout, fp8=wide))
