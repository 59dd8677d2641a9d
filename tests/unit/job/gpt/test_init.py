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


def experts_chunk(*, grouped: bool) -> Chunk:
    """Experts 2 and 3 of a layer, one by one (SequentialMLP) or grouped (TEGroupedMLP)."""
    chunk = Chunk([3])
    mlp = chunk.decoder.layers[0].mlp = torch.nn.Module()
    mlp.local_expert_indices = [2, 3]  # type: ignore[assignment]
    for i in range(2):
        path = f"linear_fc1.weight{i}" if grouped else f"local_experts.{i}.linear_fc1.weight"
        add(mlp, f"experts.{path}", shard(16, 4))
    return chunk


def add(module: torch.nn.Module, path: str, param: torch.nn.Parameter) -> None:
    """Add a parameter, and the modules that its path names."""
    *modules, last = path.split(".")
    for name in modules:
        if not hasattr(module, name):
            module.add_module(name, torch.nn.Module())
        module = module.get_submodule(name)
    module.register_parameter(last, param)


@pytest.mark.usefixtures("one_rank")
def test_grouped_experts_are_frozen_together() -> None:
    freeze([experts_chunk(grouped=True)], ("*.linear_fc1.weight",))
    one = ("*.local_experts.2.linear_fc1.weight",)
    freeze([experts_chunk(grouped=False)], one)
    with pytest.raises(ConfigError, match="matches only some experts of a layer"):
        freeze([experts_chunk(grouped=True)], one)


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
