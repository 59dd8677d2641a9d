"""A layer spec that needs no config builds the layers that the config asks for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.spawn import run_code

pytestmark = pytest.mark.unit

CODE = """
import json, torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megapack import launch
from megapack.layout import Layout
from megapack.job.gpt import initialize_parallel
from megapack.model.attention.packed import packed_seq_params
from megapack.job.gpt.specs import local_layer_spec, packed_layer

launch.start("cpu")
initialize_parallel(Layout(), 1)

def build(spec, **settings):
    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, normalization="RMSNorm",
        add_bias_linear=False, gated_linear_unit=True, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, qk_layernorm=True, **settings)
    spec = spec or local_layer_spec(config)
    return GPTModel(config, spec, 64, 64, position_embedding_type="rope")

def logits(model):
    params = packed_seq_params(torch.tensor([0, 5, 12], dtype=torch.int32), 7, 12)
    tokens = torch.arange(12)[None]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    return model(tokens, positions, None, packed_seq_params=params)

own, given = build(packed_layer), build(None)
results = {"equal": torch.equal(logits(own), logits(given))}
names = lambda model: [name for name, _ in model.named_parameters()]
results["names"] = names(own) == names(given)
experts = dict(num_moe_experts=2, moe_layer_freq=[0, 1], moe_token_dispatcher_type="alltoall")
moe = build(packed_layer, **experts)
results["layers"] = [type(layer.mlp).__name__ for layer in moe.decoder.layers]
results["router"] = type(moe.decoder.layers[1].mlp.router).__name__
launch.stop()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Models of `packed_layer` beside one of `local_layer_spec`."""
    return run_code(CODE)


def test_it_builds_what_the_spec_of_the_config_builds(found: dict[str, Any]) -> None:
    assert found["equal"]
    assert found["names"]


def test_each_layer_asks_whether_it_has_experts(found: dict[str, Any]) -> None:
    assert found["layers"] == ["MLP", "MoELayer"]
    assert found["router"] == "PackedRouter"
