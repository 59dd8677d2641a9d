"""How layers are split over pipeline chunks: Megatron's keys, balanced splits, bad settings."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from megapack import CostModel, Layout, ModelSizes
from megapack.cost import LayerSplit, StageLayers
from megapack.cost.memory import MemoryModel
from megapack.errors import ConfigError

pytestmark = pytest.mark.unit

TEXT = "pipeline_model_parallel_layout"

SIZES = ModelSizes(
    num_layers=37,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    vocab_size=100_000,
    dtype="bf16",
    untie_embeddings=True,
)


@pytest.mark.parametrize(
    ("keys", "sizes", "expected"),
    [
        ({}, {"num_layers": 8, "pp": 2, "vpp": 2}, (2, 2, 2, 2)),
        ({TEXT: "Et*9|t*10|(t)*10|t*8L"}, {"num_layers": 37, "pp": 4}, (9, 10, 10, 8)),
        ({TEXT: "Et*3|(tt|)*29,L"}, {"num_layers": 61, "pp": 31}, (3, *(2,) * 29, 0)),
        ({TEXT: "E|t|tt,mmL"}, {"num_layers": 3, "pp": 3, "num_mtp_layers": 2}, (0, 1, 2)),
    ],
)
def test_keys_give_the_layers_of_each_chunk(
    keys: dict[str, Any], sizes: dict[str, int], expected: tuple[int, ...]
) -> None:
    split = LayerSplit(**keys).stage_layers(**sizes)
    assert split.num_layers == expected
    assert (split.pp, split.vpp) == (sizes["pp"], sizes.get("vpp", 1))
    assert split.offsets == tuple(sum(expected[:chunk]) for chunk in range(len(expected)))
    text = split.to_text(sizes.get("num_mtp_layers", 0))
    assert LayerSplit(pipeline_model_parallel_layout=text).stage_layers(**sizes) == split


@pytest.mark.parametrize("num_layers", range(1, 14))
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("head", [0.0, 0.4, 3.0])
def test_a_balanced_split_has_the_least_costliest_chunk(
    num_layers: int, pp: int, vpp: int, head: float
) -> None:
    chunks = pp * vpp
    if num_layers < chunks - 2:
        with pytest.raises(ConfigError, match=f"set pp \\* vpp to at most {num_layers + 2}"):
            StageLayers.balanced([1.0] * num_layers, pp=pp, vpp=vpp, head=head)
        return
    found = StageLayers.balanced([1.0] * num_layers, pp=pp, vpp=vpp, head=head)
    assert found.total == num_layers

    def worst(layers: tuple[int, ...]) -> float:
        return max((*layers[:-1], layers[-1] + head))

    if num_layers > 9:
        return  # too many splits to try
    splits = itertools.product(range(num_layers + 1), repeat=chunks - 1)
    every = ((*s, num_layers - sum(s)) for s in splits if sum(s) <= num_layers)
    legal = (s for s in every if all(s[1:-1]))
    assert worst(found.num_layers) == min(map(worst, legal))


@pytest.mark.parametrize(
    ("keys", "sizes", "message"),
    [
        ({}, (37, 4, 1, 0), f"num_layers=37 does not divide over pp * vpp = 4 chunks; set {TEXT}="),
        ({TEXT: "Et*4|t*4"}, (8, 2, 1, 0), "has 0 L, the model 1 L; set"),
        ({TEXT: "EEt*4|t*4L"}, (8, 2, 1, 0), "has 2 E, the model 1 E; set"),
        ({TEXT: "Et*4|t*5L"}, (8, 2, 1, 0), "has 9 t, the model 8 t (num_layers); set"),
        ({TEXT: "Et*4|t*4L"}, (8, 2, 2, 0), "has 2 chunks (separated by |), pp * vpp is 4; set"),
        ({TEXT: "Et*4|t*4L"}, (8, 2, 1, 1), "has 0 m, the model 1 m (mtp_num_layers); set"),
        ({TEXT: "Et*4|m|t*4L"}, (8, 3, 1, 1), "with m between the last t and L in the last chunk"),
        ({TEXT: "Et*4|t*4m|L"}, (8, 3, 1, 1), "with m between the last t and L in the last chunk"),
        ({TEXT: "t*4E|t*4L"}, (8, 2, 1, 0), "must begin with E and end with L"),
        ({TEXT: "|Et*4|t*4L"}, (8, 3, 1, 0), "must begin with E and end with L"),
        ({TEXT: "Et*8||L"}, (8, 3, 1, 0), "chunk 1 of 3 is empty; set"),
        ({TEXT: "Ed*8|L"}, (8, 2, 1, 0), "has 'd', which is none of E, t, m, L, |, *n and ()*n"),
        ({TEXT: "E(t*99)*9999999999|L"}, (8, 2, 1, 0), "set at most 1000 times"),
        ({TEXT: ""}, (8, 2, 1, 0), "has 1 chunks (separated by |), pp * vpp is 2"),
        ({}, (3, 8, 1, 0), "num_layers=3 over pp * vpp = 8 chunks; set pp * vpp to at most 5"),
    ],
)
def test_a_split_that_does_not_add_up_is_refused(
    keys: dict[str, Any], sizes: tuple[int, int, int, int], message: str
) -> None:
    names = ("num_layers", "pp", "vpp", "num_mtp_layers")
    given = dict(zip(names, sizes, strict=True))
    with pytest.raises(ConfigError) as caught:
        LayerSplit(**keys).stage_layers(**given)
    error = str(caught.value)
    assert message in error
    assert "\n" not in error
    if f"{TEXT}='" in error.partition("; set ")[2]:
        advice = error.rpartition("='")[2].partition("'")[0]
        assert LayerSplit(pipeline_model_parallel_layout=advice).stage_layers(**given)


@pytest.mark.parametrize("layers", [(), (1, 2, 3), (1, 0, 2, 1), (-1, 2)])
def test_impossible_chunks_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="set "):
        StageLayers(layers, pp=2)


def test_weights_of_chunks_follow_their_layers_embedding_and_head() -> None:
    layout = Layout(pp=4)
    split = StageLayers((9, 10, 10, 8), pp=4)
    weights = SIZES.chunk_weights(layout, 1000, stage_layers=split)[0]
    layer = weights[1] / 10
    assert sum(weights) == pytest.approx(4)
    assert weights[2] == pytest.approx(10 * layer)
    one = (
        SIZES.last_kind.layer_flops_per_token() + SIZES.last_kind.layer_flops_per_token_sq() * 1000
    )
    assert weights[0] == pytest.approx((9 + SIZES.embedding_flops_per_token() / one) * layer)
    assert weights[3] == pytest.approx((8 + SIZES.head_flops_per_token() / one) * layer)
    cost = CostModel.from_model(SIZES, layout=layout, flops_per_gpu=1e14, stage_layers=split)
    assert cost.stage_weights == SIZES.chunk_weights(layout, 4096, stage_layers=split)[0]
    with pytest.raises(ConfigError, match="does not divide over"):
        SIZES.chunk_weights(layout, 1000)[0]
    with pytest.raises(ConfigError, match=r"splits num_layers=37, pp=4, vpp=1; .* pp=2, vpp=2"):
        SIZES.chunk_weights(Layout(pp=2, vpp=2), 1000, stage_layers=split)[0]


def test_memory_counts_the_layers_of_each_stage() -> None:
    layout = Layout(pp=4)
    layer = SIZES.last_kind.layer_parameters()
    weights = layer.split + layer.whole
    vocabulary = SIZES.vocab_size * SIZES.hidden_size
    split = StageLayers((9, 10, 12, 6), pp=4)
    model = MemoryModel(sizes=SIZES, stage_layers=split)
    found = [model.stage(layout, s, live_tokens=4000, row_tokens=1000) for s in range(4)]
    assert [stage.parameters // 2 for stage in found] == [
        9 * weights + vocabulary,
        10 * weights,
        12 * weights,
        6 * weights + vocabulary + SIZES.hidden_size,
    ]
    saved = model.saved(layout)
    assert found[2].activations == pytest.approx(
        2000 * (12 * saved.layer + saved.rotary_table), rel=1e-6
    )
    first = 4000 * (9 * saved.layer + saved.embedding + saved.rotary_table)
    assert found[0].activations == pytest.approx(first, rel=1e-6)
    fullest = model.fullest_stage(layout, live_tokens=4000, row_tokens=1000)
    assert fullest == max(found, key=lambda stage: stage.total)
    full = replace(SIZES, recompute="full")
    alone = MemoryModel(sizes=full, stage_layers=StageLayers((0, 37), pp=2))
    only_embedding = alone.stage(Layout(pp=2), 0, live_tokens=4000, row_tokens=1000)
    assert only_embedding.activations == int(4000 * alone.saved(Layout(pp=2)).embedding)
