"""Sparse attention of one unpadded sample equals Megatron's own, which has it on a CPU since 0.19.

In a child process: switching Megatron to the CPU patches torch for the rest of the process.
"""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig

from tests.dist.spawn import run_code

pytestmark = [
    pytest.mark.unit,
    # Before, its indexer takes bf16 only and needs a package that runs on CUDA.
    pytest.mark.skipif(
        not hasattr(TransformerConfig, "dsa_indexer_rotate_activation"),
        reason="Megatron-Core runs its sparse attention on a CPU since 0.19",
    ),
]

CHILD = """
import json, warnings
warnings.simplefilter("ignore")
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer, DSAIndexerSubmodules, DSAttention, DSAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megapack import launch
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt import initialize_parallel, transformer_config
from megapack.job.gpt.specs import local_layer_spec, packed_norm
from megapack.layout import Layout
from megapack.model.attention.packed import packed_seq_params
from megapack.model.attention.rotary import gather_rotary_tables
from megapack.model.attention.row import RowView, with_view
from megapack.rows.schedule_pass import SchedulePass
from tests.dist.problem import DSA_MODEL

launch.start("cpu")
initialize_parallel(Layout(), 1)
TOKENS = 23
config = transformer_config(DSA_MODEL, Layout())
config.dsa_indexer_rotate_activation = False
config.dsa_indexer_k_norm_epsilon = 1e-6
config.dsa_indexer_use_sparse_loss = True

class Duplicated(torch.nn.Linear):
    def __init__(self, in_features, out_features, **_):
        super().__init__(in_features, out_features, bias=False)
    def forward(self, x):
        return super().forward(x), None

def attention(spec):
    own = spec.submodules.self_attention
    return build_module(own, config=config, layer_number=1)

ours = attention(local_layer_spec(config))
stock = get_gpt_layer_local_spec(qk_layernorm=True, multi_latent_attention=True)
parts = stock.submodules.self_attention.submodules
parts.q_layernorm = parts.kv_layernorm = packed_norm(config)
indexer = DSAIndexerSubmodules(Duplicated, Duplicated, packed_norm(
    transformer_config(ModelConfig(normalization="LayerNorm"), Layout())), Duplicated)
parts.core_attention = ModuleSpec(DSAttention, submodules=DSAttentionSubmodules(
    indexer=ModuleSpec(DSAIndexer, submodules=indexer)))
theirs = attention(stock)

generator = torch.Generator().manual_seed(4)
with torch.no_grad():
    for param in ours.parameters():
        param.copy_(0.3 * torch.randn(param.shape, generator=generator))
own_names = dict(ours.named_parameters())
found = {"same_names": sorted(own_names) == sorted(dict(theirs.named_parameters()))}
theirs.load_state_dict(ours.state_dict(), strict=False)
hidden = torch.randn(TOKENS, 1, config.hidden_size, generator=generator)

def run(layer, **row):
    x = hidden.clone().requires_grad_()
    out, _ = layer(x, None, **row)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    grads = {name: param.grad for name, param in layer.named_parameters()}
    return out.detach(), x.grad, grads

ends = torch.tensor([0, TOKENS], dtype=torch.int32)
params = packed_seq_params(ends, TOKENS, TOKENS)
branch_of_T = torch.zeros(TOKENS, dtype=torch.int64)
with_view(params, RowView(ends, params.max_seqlen_q, [TOKENS], torch.arange(TOKENS),
                          branch_of_T=branch_of_T, copies=(1,)))
chunk = torch.nn.Module()
chunk.layer = ours
gather_rotary_tables([chunk])
follow = SchedulePass(token_weight=1.0)
ours.core_attention.follow(follow)
mine = run(ours, packed_seq_params=params)
want = run(theirs)

def error(a, b):
    return float((a - b).norm() / b.norm())

found["output"] = error(mine[0], want[0])
found["input"] = error(mine[1], want[1])
found["weights"] = {name: error(mine[2][name], grad) for name, grad in want[2].items()}
found["loss"] = float(follow.router_sums["indexer_loss"])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_code(CHILD)


def test_output_and_input_gradient_equal_megatrons(found: dict[str, Any]) -> None:
    assert found["output"] < 1e-5
    assert found["input"] < 1e-5


def test_gradients_of_weights_equal_megatrons(found: dict[str, Any]) -> None:
    """Those of the indexer are of its loss, which Megatron adds up over tokens."""
    assert sum(".indexer." in name for name in found["weights"]) == 5
    assert max(found["weights"].values()) < 1e-4
    assert found["loss"] > 0.1


def test_parameters_have_megatrons_names(found: dict[str, Any]) -> None:
    assert found["same_names"]
