"""The constructors of the real Transformer Engine, which need no GPU, unlike its kernels.

They run in a child process, because building on the CPU patches torch for the rest of a process.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.dist.spawn import run_code

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="transformer-engine is not installed",
    ),
]

CHILD = """
import dataclasses, json, warnings
warnings.simplefilter("ignore")
import torch
from megapack import launch
from megapack.job.gpt import build
from megapack.model.attention import choice
from megapack.schedule import checks
from megapack.model.attention.packed import packed_seq_params, refuse_unpacked_attention
from megapack.model.attention.choice import choose_attention
from megapack.job.gpt.init import initialize_by_name
from megapack.model.parameters import global_parameters
from megapack.layout import Layout
from megapack.job.config.sections import ModelConfig

launch.start("cpu")
layout = Layout(fp8="blockwise")
build.initialize_parallel(layout, 1)
# Pretend to have a Hopper GPU: constructors check for one but allocate nothing on it.
choice.cpu.uses_cuda = lambda: True
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *device: (9, 0)

sizes = ModelConfig(
    num_layers=2, hidden_size=128, num_attention_heads=4, num_query_groups=2, kv_channels=64,
    qk_layernorm=True, dtype="bf16",
)
config = build.transformer_config(sizes, layout)
# transformer_config must see a GPU, the constructors must not.
config.use_cpu_initialization = True
chunk = build._chunk(build.GPTModel, sizes, layout, config, 0, 384)
refuse_unpacked_attention(chunk)
checks.check_config(config, layout)
group = torch.distributed.group.WORLD
initialize_by_name([chunk], seed=1, std=0.02, num_layers=2, tp_group=group)

recipes = {}
for fp8 in ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"):
    made = build.transformer_config(dataclasses.replace(sizes, fp8=fp8), layout)
    checks.check_config(made, layout)
    from megatron.core.fp4_utils import get_fp4_recipe
    from megatron.core.fp8_utils import get_fp8_recipe
    recipe = get_fp4_recipe(made) if made.fp4 else get_fp8_recipe(made)
    recipes[fp8] = [made.fp4 or made.fp8, type(recipe).__name__]

from transformer_engine.pytorch.attention.dot_product_attention import context_parallel
from megapack.rows.slices import slice_positions
lengths = [8, 4, 12, 16]
cp = 2
cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
positions = torch.arange(sum(lengths))
torch.distributed.get_world_size = lambda group=None: cp
theirs = []
for rank in range(cp):
    torch.distributed.get_rank = lambda group=None: rank
    cut = context_parallel.get_batch_on_this_cp_rank(cu_seqlens, positions[None], None, None)
    theirs.append(cut[0][0].tolist())
ours = [slice_positions(lengths, cp, rank).tolist() for rank in range(cp)]

layer = chunk.decoder.layers[0].self_attention
params = packed_seq_params(torch.tensor([0, 70, 128], dtype=torch.int32), 70, 128)
print(json.dumps({
    "chosen": choose_attention("auto"),
    "kinds": {name: type(part).__name__ for name, part in layer.named_children()},
    "rope": config.apply_rope_fusion,
    "mask": layer.core_attention.attn_mask_type,
    "eps": chunk.decoder.layers[0].self_attention.linear_qkv.eps,
    "given": sorted(name for name in layer.core_attention.kept_packed_seq_params
                    if getattr(params, name) is not None),
    "parameters": {name: list(param.shape) for name, param in global_parameters(chunk)},
    "recipes": recipes,
    "slices": [theirs, ours],
}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Results of the child with a two-layer GPT of Transformer Engine's layers."""
    return run_code(CHILD)


def test_layers_are_transformer_engines(found: dict[str, Any]) -> None:
    assert found["chosen"] == "te"
    assert found["kinds"] == {
        "core_attention": "TEDotProductAttention",
        "linear_proj": "TERowParallelLinear",
        "linear_qkv": "TELayerNormColumnParallelLinear",
        "q_layernorm": "RMSNorm",
        "k_layernorm": "RMSNorm",
    }
    assert found["rope"]
    assert found["mask"] == "causal"
    assert found["eps"] == 1e-5


def test_attention_gets_no_padded_arrays(found: dict[str, Any]) -> None:
    assert found["given"] == [
        *("cu_seqlens_kv", "cu_seqlens_q", "max_seqlen_kv", "max_seqlen_q", "qkv_format")
    ]


def test_parameters_have_the_names_of_the_whole_model(found: dict[str, Any]) -> None:
    shapes = found["parameters"]
    assert shapes["embedding.word_embeddings.weight"] == [384, 128]
    assert shapes["decoder.layers.1.self_attention.linear_qkv.weight"] == [(4 + 2 + 2) * 64, 128]
    assert shapes["decoder.layers.1.input_layernorm.weight"] == [128]
    assert shapes["decoder.layers.0.self_attention.q_layernorm.weight"] == [64]
    assert shapes["decoder.layers.0.mlp.linear_fc1.weight"] == [2 * 4 * 128, 128]


def test_recipes_are_transformer_engines(found: dict[str, Any]) -> None:
    assert found["recipes"] == {
        "delayed": ["hybrid", "TEDelayedScaling"],
        "tensorwise": ["hybrid", "Float8CurrentScaling"],
        "blockwise": ["e4m3", "Float8BlockScaling"],
        "mxfp8": ["e4m3", "MXFP8BlockScaling"],
        "nvfp4": ["e2m1", "NVFP4BlockScaling"],
    }


def test_slices_equal_transformer_engines(found: dict[str, Any]) -> None:
    theirs, ours = found["slices"]
    assert theirs == ours
