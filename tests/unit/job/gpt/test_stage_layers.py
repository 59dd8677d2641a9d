"""Splits of layers are those that Megatron-Core itself makes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megapack.cost import LayerSplit, StageLayers
from megapack.errors import ConfigError
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt import transformer_config
from megapack.layout import Layout

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _parallel_state() -> Iterator[None]:
    yield
    parallel_state.set_pipeline_model_parallel_rank(None)
    parallel_state.set_pipeline_model_parallel_world_size(None)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


def settings(num_layers: int, pp: int, vpp: int, keys: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "pipeline_dtype": torch.float32,
        **keys,
    }


def own_split(config: TransformerConfig, pp: int, vpp: int) -> tuple[list[int], list[int]]:
    """Megatron's layers of each chunk, and the number of layers before each."""
    parallel_state.set_pipeline_model_parallel_world_size(pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp if vpp > 1 else None)
    layers = []
    offsets = []
    for chunk, rank in itertools.product(range(vpp), range(pp)):
        parallel_state.set_pipeline_model_parallel_rank(rank)
        vp_stage = chunk if vpp > 1 else None
        layers.append(get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=rank))
        offsets.append(get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=rank))
    return layers, offsets


SPLITS = [(0, 8), (8, 0), (3, 5), (0, 4, 4), (2, 1, 5), (3, 1, 4, 0), (0, 3, 5, 0), (1, 3, 1, 3)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layers", SPLITS, ids=str)
@pytest.mark.parametrize("num_mtp_layers", [0, 2])
def test_the_config_of_a_model_has_its_split(layers: tuple[int, ...], num_mtp_layers: int) -> None:
    """Megatron reads the text that a split is passed on as, and finds the same split."""
    pp, vpp = (2, len(layers) // 2) if len(layers) % 2 == 0 else (len(layers), 1)
    model = ModelConfig(
        num_layers=8, hidden_size=16, num_attention_heads=4, mtp_num_layers=num_mtp_layers
    )
    split = StageLayers(layers, pp)
    config = transformer_config(model, Layout(pp=pp, vpp=vpp), split)
    assert own_split(config, pp, vpp) == (list(layers), list(split.offsets))
    assert not config.mtp_standalone


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "text",
    [
        *("Et*3|t*4|(t)*1L", "E,(t|)*2,t*5,t,L", "Ett*3|tt|ttL", "E(t*2)*2|t*3|tL"),
        *("E(tt|)*2t*4L", "Et(t|t)*2t|t*3L", "Et*8|(|)*1L", "Et*4|t*4L", "tE|t*7|L", "Et*8|L"),
        *("Et*3|t*4|t*2L", "E|t*4|t*4", "(E|)*1t*4|t*4L", "Et*4|t*4|L|"),
    ],
)
def test_a_text_is_read_as_megatron_reads_it(text: str) -> None:
    keys = {"pipeline_model_parallel_layout": text}
    try:
        config = TransformerConfig(**settings(8, 3, 1, keys))
        theirs = own_split(config, 3, 1)[0]
    except AssertionError:
        with pytest.raises(ConfigError):
            LayerSplit(**keys).stage_layers(8, pp=3)
        return
    if not all(theirs[1:-1]):
        with pytest.raises(ConfigError, match="is empty"):
            LayerSplit(**keys).stage_layers(8, pp=3)
        return
    assert list(LayerSplit(**keys).stage_layers(8, pp=3).num_layers) == theirs
