"""Rows with a gathered rotary table give what Megatron's own path for packed rows gives.

A whole Megatron GPT in a child process: switching Megatron to the CPU patches torch for the rest of
the process.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.spawn import run_code

pytestmark = pytest.mark.unit

MODELS = [
    *("plain", "interleaved", "partial", "partial_interleaved", "llama3", "yarn"),
    *("some_layers", "query_norm", "recompute_full", "recompute_selective"),
]

LATENT_MODELS = ["latent", "latent_yarn", "latent_recompute_full", "latent_recompute_up"]

CHILD = """
import json, warnings
warnings.simplefilter("ignore")
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megapack import launch
from megapack.job.config.sections import ModelConfig
from megapack.layout import Layout
from megapack.job.gpt import initialize_parallel, transformer_config
from megapack.model.attention import rotary
from megapack.model.attention.packed import packed_seq_params
from megapack.model.attention.row import RowView, with_view
from megapack.model.attention.rotary import gather_rotary_tables, gathers
from megapack.job.gpt.init import initialize_by_name
from megapack.job.gpt.specs import local_layer_spec, packed_norm

launch.start("cpu")
layout = Layout()
initialize_parallel(layout, 1)
LENGTHS = [20, 1, 9, 34, 1, 5]
T = sum(LENGTHS)
tokens = torch.randint(0, 128, (T,), generator=torch.Generator().manual_seed(2))
positions = torch.cat([torch.arange(n) for n in LENGTHS])
cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()

YARN = {
    "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0, "yarn_correction_range_round_to_int": True,
}

LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "num_query_groups": None,
}

def gpt(recompute="none", qk_layernorm=False, fields={}, sizes={}, **options):
    sizes = ModelConfig(**{
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
        "ffn_hidden_size": 48, "init_std": 0.2, "recompute": recompute,
        "qk_layernorm": qk_layernorm, **sizes,
    })
    config = transformer_config(sizes, layout)
    for name, value in fields.items():
        setattr(config, name, value)
    layers = [local_layer_spec(config)] * 2
    spec = TransformerBlockSubmodules(layers, layer_norm=packed_norm(config))
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=128, max_sequence_length=512,
        **{"position_embedding_type": "rope", **options},
    )
    group = torch.distributed.group.WORLD
    initialize_by_name([model], seed=1, std=0.2, num_layers=2, tp_group=group)
    return model

def params(gathered):
    params = packed_seq_params(cu_seqlens, max(LENGTHS), T)
    view = RowView(cu_seqlens, params.max_seqlen_q, LENGTHS, positions)
    return with_view(params, view) if gathered else params

def run(model, gathered):
    model.zero_grad()
    logits = model(tokens[None], positions[None], None, packed_seq_params=params(gathered))
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logits.detach(), grads

def compare(model):
    # Megatron's own path, before the hooks, and with them for a row without positions.
    before = run(model, False)
    gather_rotary_tables([model])
    gather_rotary_tables([model])
    after = run(model, False)
    mine = run(model, True)
    error = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, before)]
    return {
        "gathers": gathers(model),
        "error": max(error),
        "same_without_positions": all(map(torch.equal, before, after)),
    }

found = {name: compare(gpt(**options)) for name, options in {
    "plain": {},
    "interleaved": {"fields": {"rotary_interleaved": True}},
    "partial": {"rotary_percent": 0.5},
    "partial_interleaved": {"rotary_percent": 0.5, "fields": {"rotary_interleaved": True}},
    "llama3": {"rope_scaling": True, "rotary_base": 500},
    "yarn": {"position_embedding_type": "yarn", "fields": YARN},
    "some_layers": {"fields": {"no_rope_freq": [0, 1]}},
    "query_norm": {"qk_layernorm": True},
    "recompute_full": {"recompute": "full"},
    "recompute_selective": {"recompute": "selective"},
    "latent": {"sizes": LATENT},
    "latent_yarn": {"sizes": LATENT, "fields": {"rope_type": "yarn"}},
    "latent_recompute_full": {"sizes": LATENT, "recompute": "full"},
    "latent_recompute_up": {"sizes": LATENT, "recompute": "selective",
                            "fields": {"recompute_modules": ["mla_up_proj"]}},
}.items()}

# A wrong position must change the result, or the comparison above would show nothing.
model = gpt()
gather_rotary_tables([model])
right = run(model, True)[0]
positions = positions.flip(0)
found["sees_positions"] = not torch.allclose(right, run(model, True)[0], atol=1e-3)
positions = positions.flip(0)

# What reads tensors on the host while layers run.
READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__")

class OnDevice(torch.Tensor):
    # Of the row's description, or made of it: on a GPU the host waits for what it reads.

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in READS:
            device_reads.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})

on_host = cu_seqlens, positions
cu_seqlens, positions = (tensor.as_subclass(OnDevice) for tensor in on_host)
model = gpt(sizes=LATENT)
gather_rotary_tables([model])
for name, gathered in {"megatron": False, "gathered": True}.items():
    device_reads = []
    run(model, gathered)
    found[f"latent_reads_{name}"] = device_reads
cu_seqlens, positions = on_host

# Transformer Engine's kernel for a batch, and that for packed rows.
calls, tables = [], set()
def fused(t, freqs, interleaved=False):
    calls.append([list(t.shape), list(freqs.shape), str(freqs.dtype)])
    tables.add(freqs.data_ptr())
    return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)
rope_utils.fused_apply_rotary_pos_emb = fused
rope_utils.fused_apply_rotary_pos_emb_thd = lambda *args, **kwargs: calls.append("packed")
model = gpt()
unfused = run(model, False)
gather_rotary_tables([model])
model.config.apply_rope_fusion = True
mine = run(model, True)
found["fused"] = {
    "calls": calls, "num_tables": len(tables),
    "error": max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, unfused)),
}

class Own(SelfAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)

class Harmless(SelfAttention):
    pass

def with_attention(kind):
    model = gpt()
    model.decoder.layers[1].self_attention.__class__ = kind
    return model

def hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

multimodal = gpt()
multimodal.rotary_pos_emb = MultimodalRotaryEmbedding(8, 1.0)
learned = gpt(position_embedding_type="learned_absolute")
models = {"own": with_attention(Own), "harmless": with_attention(Harmless),
          "multimodal": multimodal, "learned": learned}
before = {name: hooks(model) for name, model in models.items()}
gather_rotary_tables(models.values())
found["hooked"] = {name: hooks(model) - before[name] for name, model in models.items()}
found["reads_on_host"] = rotary.READS_ON_HOST
found["own_is_right"] = torch.equal(run(models["own"], True)[0], run(gpt(), False)[0])
launch.stop()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Results of the child."""
    return run_code(CHILD)


@pytest.mark.parametrize("model", [*MODELS, *LATENT_MODELS])
def test_a_gathered_table_gives_megatrons_result(found: dict[str, Any], model: str) -> None:
    # Of multi-latent attention, layers gather.
    assert found[model]["gathers"] == (model in MODELS)
    assert found[model]["error"] < 2e-6
    assert found["sees_positions"]


@pytest.mark.parametrize("model", [*MODELS, *LATENT_MODELS])
def test_a_row_without_positions_takes_megatrons_path(found: dict[str, Any], model: str) -> None:
    assert found[model]["same_without_positions"]


def test_layers_of_multi_latent_attention_do_not_wait_for_the_device(found: dict[str, Any]) -> None:
    assert found["latent_reads_gathered"] == []
    assert (found["latent_reads_megatron"].count("tolist") >= 4) == found["reads_on_host"]


def test_the_fused_kernel_gets_a_batch_of_one_sequence(found: dict[str, Any]) -> None:
    heads, groups, width, tokens = 4, 2, 8, 70
    table = [tokens, 1, 1, width]
    assert (
        found["fused"]["calls"]
        == [
            [[tokens, 1, heads, width], table, "torch.float32"],
            [[tokens, 1, groups, width], table, "torch.float32"],
        ]
        * 2
    )
    assert found["fused"]["error"] < 2e-6


def test_all_layers_share_one_table(found: dict[str, Any]) -> None:
    assert found["fused"]["num_tables"] == 1


def test_models_that_do_not_fit_keep_megatrons_path(found: dict[str, Any]) -> None:
    # The block's hook and three in each of two layers.
    assert found["hooked"] == {"own": 0, "harmless": 7, "multimodal": 0, "learned": 0}
    assert found["own_is_right"]
