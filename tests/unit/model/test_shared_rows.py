"""A model gives samples that share prefixes in a row what it gives them alone, with its gradients.

Whole Megatron GPTs in a child process: switching Megatron to the CPU patches torch for the rest of
the process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from megapack.model.attention.rotary import READS_ON_HOST, latent_row
from megapack.rows.slices import slice_positions
from tests.dist.spawn import run_code
from tests.forests import random_forest
from tests.groups import RankOf

pytestmark = pytest.mark.unit

# Other rotations are those of `test_rotary`: here positions matter.
MODELS = [
    *("plain", "yarn", "some_layers", "learned", "no_positions"),
    *("recompute_full", "recompute_selective", "fused", "te", "te_selective", "te_latent"),
    *("latent", "latent_yarn", "latent_selective", "latent_queries"),
]

CHILD = """
import dataclasses, json, warnings
warnings.simplefilter("ignore")
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megapack import MicroBatch, launch
from megapack.job.config.sections import ModelConfig
from megapack.layout import Layout
from megapack.job.gpt import initialize_parallel, transformer_config
from megapack.model.attention import packed
from megapack.model.attention.packed import row_params
from megapack.model.attention.rotary import gather_rotary_tables, position_obstacle
from megapack.model.attention.te_rows import hook_te_attention
from megapack.job.gpt.init import initialize_by_name
from megapack.job.gpt.specs import local_layer_spec, packed_norm
from megapack.prefixes import PrefixTable, SharedPrefixes
from megapack.rows.packed import PlacedRow
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch

launch.start("cpu")
layout = Layout()
initialize_parallel(layout, 1)
generator = torch.Generator().manual_seed(2)

def drawn(n):
    return torch.randint(0, 128, (n,), generator=generator).tolist()

trunk, fork = drawn(20), drawn(9)
SAMPLES = [
    trunk + [1] + drawn(5), drawn(7), trunk + [2] + fork + [3] + drawn(11), drawn(30),
    trunk + [2] + fork + [4] + drawn(3), trunk + [2] + fork + [5] + drawn(3), trunk + [6],
]
batch = SampleBatch(SAMPLES)
lengths = [len(sample) for sample in SAMPLES]
table = PrefixTable(SharedPrefixes.from_samples(SAMPLES), [*map(len, SAMPLES)], layout)

def row_of(samples, prefixes, dummies=0):
    own = [lengths[i] for i in samples]
    saved = 0
    if prefixes is not None:
        import numpy as np
        saved = int(prefixes.saved(np.array(samples), np.zeros(len(samples), dtype=int), 1)[0][0])
    held = sum(own) - saved
    micro_batch = MicroBatch(
        tuple(samples), row_tokens=held + dummies, tokens=sum(own),
        tokens_sq=sum(n * n for n in own), padded_tokens=held,
    )
    row = pack_row(batch, micro_batch, layout, prefixes=prefixes)
    return PlacedRow.of(row, params=row_params(row))

LATENT = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_query_groups": None,
}
YARN = {
    "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0, "yarn_correction_range_round_to_int": True,
}

# In place of Megatron's wrapper of Transformer Engine's attention, whose kernels need a GPU.
class TEDotProductAttention(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.scale = layer.self_attention.core_attention.softmax_scale
        self.config, self.layer_number = layer.config, layer.layer_number

    def forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias=None,
                packed_seq_params=None, num_splits=None):
        own = {f: getattr(packed_seq_params, f) for f in WRAPPER_FIELDS}
        cu_q, cu_k = own["cu_seqlens_q"], own["cu_seqlens_kv"]
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert own["max_seqlen_q"] >= int(cu_q.diff().max())
        assert own["max_seqlen_kv"] >= int(cu_k.diff().max())
        assert own["max_seqlen_q"] <= own["max_seqlen_kv"]
        # As the wrapper does for packed rows.
        if attn_mask_type == AttnMaskType.causal:
            attn_mask_type = AttnMaskType.padding_causal
        masks.add((attn_mask_type.name, torch.equal(cu_q, cu_k)))
        out = []
        for i in range(len(cu_q) - 1):
            q = query[cu_q[i]:cu_q[i + 1]]
            k, v = (x[cu_k[i]:cu_k[i + 1]].repeat_interleave(q.shape[1] // x.shape[1], 1)
                    for x in (key, value))
            # "padding_causal" aligns the first query with the first key.
            shift = len(k) - len(q) if attn_mask_type.name.endswith("bottom_right") else 0
            seen = torch.ones(len(q), len(k)).tril(shift).bool()
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
            p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", p, v))
        return torch.cat(out).flatten(1)

WRAPPER_FIELDS = [field.name for field in dataclasses.fields(PackedSeqParams)]
masks = set()

def gpt(sizes={}, fields={}, te=False, **options):
    model_config = ModelConfig(**{
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
        "ffn_hidden_size": 48, "init_std": 0.2, **sizes,
    })
    config = transformer_config(model_config, layout)
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
    for layer in model.decoder.layers if te else ():
        layer.self_attention.core_attention = TEDotProductAttention(layer)
    for _ in range(2):
        gather_rotary_tables([model])
        hook_te_attention([model])
    return model

def backward(model, row, weights):
    # The weights of all tokens of the row's samples; a shared position has several.
    logits = model(row.tokens_T[None], row.position_ids_T[None], None, packed_seq_params=row.params)
    logits_NV = logits[0, row.positions_N].float()
    (logits_NV * weights).sum().backward()
    return logits_NV.detach()

def gradients(model):
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])

def compare(model):
    weights_N = torch.randn(sum(lengths), 128, generator=torch.Generator().manual_seed(3))
    weights = list(weights_N.split(lengths))
    alone = [backward(model, row_of([i], None), weights[i]) for i in range(len(SAMPLES))]
    wanted = torch.cat(alone), gradients(model)
    model.zero_grad(set_to_none=True)
    row = row_of(list(range(len(SAMPLES))), table, dummies=13)
    found = backward(model, row, weights_N), gradients(model)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted)]
    num_shared = sum(lengths) - len(set(row.positions_N.tolist()))
    return {"error": max(errors), "obstacle": position_obstacle(model), "shared": num_shared}

def fused(t, freqs, interleaved=False):
    return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)

found = {name: compare(gpt(**options)) for name, options in {
    "plain": {},
    "yarn": {"position_embedding_type": "yarn", "fields": YARN},
    "some_layers": {"fields": {"no_rope_freq": [0, 1]}},
    "learned": {"position_embedding_type": "learned_absolute"},
    "no_positions": {"position_embedding_type": "none"},
    "recompute_full": {"sizes": {"recompute": "full"}},
    "recompute_selective": {"sizes": {"recompute": "selective"}},
    "latent": {"sizes": LATENT},
    "latent_yarn": {"sizes": LATENT, "fields": {"rope_type": "yarn"}},
    "latent_selective": {"sizes": {**LATENT, "recompute": "selective"},
                         "fields": {"recompute_modules": ["mla_up_proj", "core_attn"]}},
    "latent_queries": {"sizes": {**LATENT, "q_lora_rank": 12}},
    "te": {"te": True},
    "te_selective": {"te": True, "sizes": {"recompute": "selective"}},
    "te_latent": {"te": True, "sizes": LATENT},
}.items()}

found["masks"] = sorted(masks)

rope_utils.fused_apply_rotary_pos_emb = fused
rope_utils.fused_apply_rotary_pos_emb_thd = None
found["fused"] = compare(gpt(fields={"apply_rope_fusion": True}))
rope_utils.fused_apply_rotary_pos_emb = None
fused_latent = gpt(sizes=LATENT)
fused_latent.config.apply_rope_fusion = True
found["fused_latent"] = position_obstacle(fused_latent)

class Own(SelfAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)

other = gpt()
other.decoder.layers[1].self_attention.__class__ = Own
found["own"] = position_obstacle(other)

launch.stop()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Results of the child."""
    return run_code(CHILD)


@pytest.mark.parametrize("model", MODELS)
def test_a_row_of_branches_gives_what_samples_alone_give(found: dict[str, Any], model: str) -> None:
    assert found[model]["shared"] > 80
    assert found[model]["obstacle"] is None
    # fp32 adds up gradients in another order.
    assert found[model]["error"] < 5e-6


def test_transformer_engine_gets_another_mask_for_shared_prefixes_only(
    found: dict[str, Any],
) -> None:
    assert found["masks"] == [
        ["padding_causal", True],
        ["padding_causal_bottom_right", False],
    ]


def test_what_finds_positions_by_itself_is_refused(found: dict[str, Any]) -> None:
    assert found["fused_latent"].startswith("apply_rope_fusion=True in multi-latent")
    assert found["own"] == "Own with position_embedding_type='rope'"


def test_ends_of_a_row_are_where_megatron_reads_them() -> None:
    """Since it finds positions on the device, it searches in the ends there."""
    row = random_forest(2, 1)
    positions = row.positions_T.to("meta")
    as_one, _ = latent_row(row.params(1), positions, RankOf(0, 1))
    assert as_one.cu_seqlens_q.device.type == ("cpu" if READS_ON_HOST else "meta")


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_megatron_takes_a_rank_its_lines_of_the_rows_table(cp: int, width: int) -> None:
    """Multi-latent attention of `cp` ranks, of a row over `width` times as many."""
    row = random_forest(2, cp * width)
    table = torch.randn(int(row.positions_T.max()) + 1, 1, 1, 8)
    for number in range(cp * width):
        mine = slice_positions(row.spans, cp * width, number)
        own = row.positions_T[mine]
        group = RankOf(number % cp, cp)
        as_one, lines = latent_row(row.params(cp), own, group)
        values = torch.randn(len(own), 3, 8)
        rotated = rope_utils._apply_rotary_pos_emb_thd(
            values, as_one.cu_seqlens_q, table[lines], cp_group=group
        )
        expected = rope_utils._apply_rotary_pos_emb_bshd(values[:, None], table[own])
        assert rotated.equal(expected[:, 0])
