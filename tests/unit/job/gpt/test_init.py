"""Weights by name: slices reassemble, and values do not depend on the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megapack.errors import ConfigError
from megapack.job.gpt.init import freeze, full_shape, initialize_by_name, local_slice
from megapack.model.parameters import (
    global_parameters,
    keep_gradients_through_recompute,
    mark_experts,
    mark_splits,
)
from tests.groups import RankOf

pytestmark = pytest.mark.unit


def shard(*shape: int, dim: int | None = 0, stride: int = 1) -> torch.nn.Parameter:
    """One rank's parameter, marked as Megatron does; dim=None: replicated on all ranks."""
    param = torch.nn.Parameter(torch.zeros(shape))
    if dim is not None:
        param.tensor_model_parallel = True  # type: ignore[attr-defined]
        param.partition_dim = dim  # type: ignore[attr-defined]
        param.partition_stride = stride  # type: ignore[attr-defined]
    return param


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_slices_reassemble_the_whole(tp: int, dim: int) -> None:
    whole = torch.arange(8 * 8.0).view(8, 8)
    shape = [8, 8]
    shape[dim] //= tp
    param = shard(*shape, dim=dim)
    assert full_shape(param, tp) == (8, 8)
    slices = [local_slice(whole, param, rank, tp) for rank in range(tp)]
    assert all(piece.shape == param.shape for piece in slices)
    assert torch.equal(torch.cat(slices, dim=dim), whole)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_slices_of_gate_and_up_hold_a_piece_of_each(tp: int) -> None:
    gate = torch.arange(8.0).view(8, 1)
    up = torch.arange(100.0, 108.0).view(8, 1)
    param = shard(16 // tp, 1, stride=2)
    slices = [local_slice(torch.cat([gate, up]), param, rank, tp) for rank in range(tp)]
    # A rank's MLP splits its slice in two: the first half must be gate, the second up.
    halves = [piece.chunk(2) for piece in slices]
    assert torch.equal(torch.cat([half[0] for half in halves]), gate)
    assert torch.equal(torch.cat([half[1] for half in halves]), up)


class Chunk(torch.nn.Module):
    """Parameters named as in Megatron's GPTModel; layer numbers count from 1 over all stages."""

    def __init__(self, layer_numbers: list[int], *, tied: bool = False, tp: int = 1) -> None:
        super().__init__()
        self.share_embeddings_and_output_weights = tied
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([self._layer(n, tp) for n in layer_numbers])
        self.output_layer = torch.nn.Module()
        self.output_layer.weight = shard(32 // tp, 16)

    @staticmethod
    def _layer(number: int, tp: int) -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.layer_number = number  # type: ignore[assignment]
        layer.linear_qkv = torch.nn.Module()
        layer.linear_proj = torch.nn.Module()
        layer.linear_qkv.weight = shard(64 // tp, 16)
        layer.linear_qkv.bias = shard(64 // tp)
        layer.linear_proj.weight = shard(16, 64 // tp, dim=1)
        layer.norm = torch.nn.LayerNorm(16)
        return layer


def fill(*chunks: Chunk, seed: int = 1, rank: int = 0, tp: int = 1) -> dict[str, Tensor]:
    for chunk in chunks:
        for param in chunk.parameters():
            param.data.fill_(9.0)
    initialize_by_name(chunks, seed=seed, std=0.5, num_layers=4, tp_group=RankOf(rank, tp))
    return {name: p.detach() for chunk in chunks for name, p in global_parameters(chunk)}


def test_experts_are_cut_over_their_own_ranks() -> None:
    """Two tensor-parallel ranks that each hold whole experts (etp=1)."""
    chunk = Chunk([1])
    chunk.decoder.layers[0].mlp = torch.nn.Module()
    chunk.decoder.layers[0].mlp.experts = torch.nn.Module()
    chunk.decoder.layers[0].mlp.local_expert_indices = [3]
    chunk.decoder.layers[0].mlp.experts.linear_fc1 = torch.nn.Module()
    chunk.decoder.layers[0].mlp.experts.linear_fc1.weight0 = shard(64, 16)
    name = "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"
    groups = {"tp_group": RankOf(1, 2), "expert_tp_group": RankOf(0, 1)}
    initialize_by_name([chunk], seed=1, std=0.5, num_layers=4, **groups)
    found = dict(global_parameters(chunk))[name]
    initialize_by_name([chunk], seed=1, std=0.5, num_layers=4, tp_group=RankOf(0, 1))
    again = dict(global_parameters(chunk))[name]
    assert torch.equal(found, again)


def test_ddp_adds_gradients_of_experts_over_their_own_ranks() -> None:
    chunk = torch.nn.ModuleDict(
        {"experts": torch.nn.Linear(2, 2), "shared_experts": torch.nn.Linear(2, 2, bias=False)}
    )
    mlp = torch.nn.ModuleDict({"mlp": chunk})
    mark_experts([mlp])
    marks = {name: getattr(p, "allreduce", True) for name, p in mlp.named_parameters()}
    assert marks == {
        "mlp.experts.weight": False,
        "mlp.experts.bias": False,
        "mlp.shared_experts.weight": True,
    }


@pytest.mark.parametrize(
    ("stored", "whole"),
    [
        ("local_experts.1.linear_fc1.weight", "local_experts.5.linear_fc1.weight"),
        ("linear_fc1.weight1", "local_experts.5.linear_fc1.weight"),
    ],
)
def test_names_number_experts_over_all_ranks(stored: str, whole: str) -> None:
    """Expert 1 of the rank that holds experts 4 and 5, as modules or grouped."""
    chunk = Chunk([3])
    mlp = chunk.decoder.layers[0].mlp = torch.nn.Module()
    mlp.local_expert_indices = [4, 5]  # type: ignore[assignment]
    add(mlp, f"experts.{stored}", shard(6, 2))
    names = [name for name, _ in global_parameters(chunk)]
    assert f"decoder.layers.2.mlp.experts.{whole}" in names


def experts_chunk(*, grouped: bool, tp: int = 1, te: bool = True) -> Chunk:
    """Experts 2 and 3 of a layer, one by one (SequentialMLP) or grouped (TEGroupedMLP)."""
    chunk = Chunk([3], tp=tp)
    mlp = chunk.decoder.layers[0].mlp = torch.nn.Module()
    mlp.local_expert_indices = [2, 3]  # type: ignore[assignment]
    for i in range(2):
        for name, shape, dim in ("linear_fc1", (16 // tp, 4), 0), ("linear_fc2", (4, 8 // tp), 1):
            # Transformer Engine marks the weights of all experts like this.
            param = shard(*shape) if te else shard(*shape, dim=dim, stride=2 if dim == 0 else 1)
            path = f"{name}.weight{i}" if grouped else f"local_experts.{i}.{name}.weight"
            add(mlp, f"experts.{path}", param)
    mark_splits(chunk, etp=tp, gated=True)
    return chunk


def add(module: torch.nn.Module, path: str, param: torch.nn.Parameter) -> None:
    """Add a parameter, and the modules that its path names."""
    *modules, last = path.split(".")
    for name in modules:
        if not hasattr(module, name):
            module.add_module(name, torch.nn.Module())
        module = module.get_submodule(name)
    module.register_parameter(last, param)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_experts_of_transformer_engine_have_the_weights_of_local_ones(
    grouped: bool, tp: int, rank: int
) -> None:
    local = fill(experts_chunk(grouped=False, tp=tp, te=False), rank=rank, tp=tp)
    found = fill(experts_chunk(grouped=grouped, tp=tp), rank=rank, tp=tp)
    assert "decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight" in local
    assert found.keys() == local.keys()
    for name, value in local.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("etp", "counts"), [(1, True), (2, False)])
def test_biases_of_whole_experts_count_on_each_rank(etp: int, counts: bool) -> None:
    """Also where an optimizer has copied the marks already."""
    chunk = Chunk([1])
    bias = torch.nn.Parameter(torch.zeros(4))
    bias.main_param = torch.zeros(4)  # type: ignore[attr-defined]
    add(chunk, "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.bias", bias)
    shared = torch.nn.Parameter(torch.zeros(4))
    add(chunk, "decoder.layers.0.mlp.shared_experts.linear_fc2.bias", shared)
    mark_splits(chunk, etp=etp, gated=True)
    for param in (bias, bias.main_param):  # type: ignore[attr-defined]
        assert getattr(param, "tensor_model_parallel", False) == counts
    assert not getattr(shared, "tensor_model_parallel", False)
    assert full_shape(bias, etp) == (4,)


class TELinear(torch.nn.Module):
    """By its name a projection that every rank has whole."""


def test_whole_projections_of_transformer_engine_are_not_cut() -> None:
    chunk = Chunk([1])
    chunk.decoder.layers[0].linear_kv_down_proj = TELinear()
    add(chunk, "decoder.layers.0.linear_kv_down_proj.weight", shard(6, 4))
    mark_splits(chunk, etp=1, gated=True)
    name = "decoder.layers.0.linear_kv_down_proj.weight"
    first, second = (fill(chunk, rank=rank, tp=2)[name].clone() for rank in (0, 1))
    assert torch.equal(first, second)


@pytest.mark.usefixtures("one_rank")
def test_grouped_experts_are_frozen_together() -> None:
    freeze([experts_chunk(grouped=True)], ("*.linear_fc1.weight",))
    one = ("*.local_experts.2.linear_fc1.weight",)
    freeze([experts_chunk(grouped=False)], one)
    with pytest.raises(ConfigError, match="matches only some experts of a layer"):
        freeze([experts_chunk(grouped=True)], one)


def test_a_tied_output_layer_has_the_name_of_the_embedding() -> None:
    tied = fill(Chunk([1], tied=True))
    assert "output_layer.weight" not in tied
    untied = fill(Chunk([1]))
    assert "embedding.word_embeddings.weight" not in untied
    embedding = tied["embedding.word_embeddings.weight"]
    assert not torch.equal(embedding, untied["output_layer.weight"])


def test_values_do_not_depend_on_the_stages() -> None:
    whole = fill(Chunk([1, 2, 3, 4]))
    for cut in ([1, 2], [3, 4]), ([1], [2], [3], [4]), ([1, 3], [2, 4]):
        parts = fill(*[Chunk(layers) for layers in cut])
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_values_depend_only_on_seed_and_name() -> None:
    first, again, other = fill(Chunk([1, 2])), fill(Chunk([1, 2])), fill(Chunk([1, 2]), seed=2)
    weights = [name for name in first if first[name].dim() == 2]
    assert len(weights) == 5
    for name in weights:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
    qkv = [first[f"decoder.layers.{layer}.linear_qkv.weight"] for layer in (0, 1)]
    assert not torch.equal(*qkv)


def test_initial_scales_of_each_kind_of_parameter() -> None:
    found = fill(Chunk([1]))
    layer = "decoder.layers.0."
    assert torch.equal(found[layer + "norm.weight"], torch.ones(16))
    assert not found[layer + "norm.bias"].any()
    assert not found[layer + "linear_qkv.bias"].any()
    assert found[layer + "linear_qkv.weight"].std().item() == pytest.approx(0.5, rel=0.1)
    # 4 layers: 0.5 / sqrt(2 * 4)
    assert found[layer + "linear_proj.weight"].std().item() == pytest.approx(0.177, rel=0.1)


class Embedding(torch.nn.Embedding):
    """A stand-in for Megatron's embedding."""


class FrozenChunk(torch.nn.Module):
    """The parts of a GPT chunk that `freeze` reads."""

    share_embeddings_and_output_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(4, 2)
        self.head = torch.nn.Linear(2, 2)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def trained(chunk: Any) -> list[str]:
    return [name for name, param in chunk.named_parameters() if param.requires_grad]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ((), ["embedding.weight", "head.weight", "head.bias"]),
        (("embedding.*",), ["head.weight", "head.bias"]),
        (("*.bias",), ["embedding.weight", "head.weight"]),
        (("head.[bw]*", "embedding.weight"), []),
    ],
)
def test_freeze_selects_parameters_by_glob(patterns: tuple[str, ...], expected: list[str]) -> None:
    chunk = FrozenChunk()
    freeze([chunk], patterns)
    assert trained(chunk) == expected


class FusedChunk(torch.nn.Module):
    """A layer's parameters under Transformer Engine's names."""

    share_embeddings_and_output_weights = False

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        layer = torch.nn.Module()
        layer.layer_number = 3  # type: ignore[assignment]
        self.decoder.layers = torch.nn.ModuleList([layer])
        for name in names:
            *path, last = name.split(".")
            part = layer
            for step in path:
                part.add_module(step, getattr(part, step, torch.nn.Module()))
                part = getattr(part, step)
            part.register_parameter(last, torch.nn.Parameter(torch.zeros(1)))


FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "self_attention.linear_qkv.weight": "self_attention.linear_qkv.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
}


def test_fused_norms_have_the_names_of_local_layers() -> None:
    named = dict(global_parameters(FusedChunk(*FUSED)))
    assert sorted(named) == sorted(f"decoder.layers.2.{name}" for name in FUSED.values())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("pattern", "frozen"),
    [
        ("*.mlp.*", ["mlp.linear_fc1.weight"]),
        ("*.pre_mlp_layernorm.*", ["mlp.linear_fc1.layer_norm_weight"]),
        ("*.q_layernorm.*", ["self_attention.linear_q_up_proj.layer_norm_weight"]),
        ("*.linear_qkv.*", ["self_attention.linear_qkv.weight"]),
    ],
)
def test_globs_do_not_depend_on_the_fusion_of_norms(pattern: str, frozen: list[str]) -> None:
    chunk = FusedChunk(*FUSED)
    freeze([chunk], (pattern,))
    assert {f"decoder.layers.0.{name}" for name in FUSED} - set(trained(chunk)) == {
        f"decoder.layers.0.{name}" for name in frozen
    }


@pytest.mark.usefixtures("one_rank")
def test_a_glob_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no parameter matches 'haed\.\*'"):
        freeze([FrozenChunk()], ("head.*", "haed.*"))


@pytest.mark.usefixtures("one_rank")
def test_a_bias_that_would_get_no_gradient_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight of 1 linear layers and not the bias"):
        freeze([FrozenChunk()], ("*.weight",))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("granularity", "expected"), [("full", True), ("selective", True), (None, False)]
)
def test_a_frozen_embedding_requires_grad_under_recompute(
    granularity: str | None, expected: bool
) -> None:
    chunk = FrozenChunk()
    freeze([chunk], ("embedding.*",))
    config = type("Config", (), {"recompute_granularity": granularity})
    keep_gradients_through_recompute([chunk], config)
    assert chunk.embedding(torch.tensor([1])).requires_grad is expected
    with torch.no_grad():
        assert not chunk.embedding(torch.tensor([1])).requires_grad
