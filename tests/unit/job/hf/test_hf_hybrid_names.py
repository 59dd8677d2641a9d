"""Which rows of hybrid families' tensors Megatron's parts consist of."""

from __future__ import annotations

import pytest
import torch

from megapack.errors import ConfigError
from megapack.job.hf.blocks import Block, hf_shapes, row_spans
from megapack.job.hf.names import Rows, TensorNames
from megapack.job.hf.unused import LeftOut

pytestmark = pytest.mark.unit

# 2 key heads of 3, 4 value heads of 5; 4 heads of 8 in 2 groups; experts.
QWEN = {
    "num_layers": 6,
    "hybrid_layer_pattern": "GE*EGE",
    "hidden_size": 32,
    "vocab_size": 5,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "attention_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "num_experts": 4,
}
# 4 heads of 3, 2 groups, states of 5.
NEMOTRON = {
    "num_layers": 4,
    "hybrid_layer_pattern": "M*-E",
    "hidden_size": 32,
    "vocab_size": 5,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 3,
    "mamba_num_groups": 2,
    "mamba_state_dim": 5,
    "num_experts": 4,
}
PROJECTION = "self_attention.in_proj.weight"
STACKED = ("model.language_model.layers.0.mlp.experts.gate_up_proj",)


def rows(names: TensorNames, key: str, num_rows: int, *index: int) -> list[tuple[str, int, int]]:
    """Rows without the beginning of their names."""
    found = names.rows(f"decoder.layers.{key}", index, num_rows)
    return [(one.name.removeprefix("model.layers."), one.start, one.count) for one in found]


def test_parts_of_qwen3_next_are_stacked_by_key_head() -> None:
    """A key head's 26 rows: query 3, key 3, values of two heads 10, their gates 10."""
    names = TensorNames("qwen3_next", QWEN)
    qkvz = "2.linear_attn.in_proj_qkvz.weight"
    ba = "2.linear_attn.in_proj_ba.weight"
    expected = {
        "query": [(qkvz, 0, 3), (qkvz, 26, 3)],
        "key": [(qkvz, 3, 3), (qkvz, 29, 3)],
        "value": [(qkvz, 6, 10), (qkvz, 32, 10)],
        "z": [(qkvz, 16, 10), (qkvz, 42, 10)],
        "beta": [(ba, 0, 2), (ba, 4, 2)],
        "alpha": [(ba, 2, 2), (ba, 6, 2)],
    }
    for part, places in expected.items():
        count = sum(count for _, _, count in places)
        assert rows(names, f"4.{PROJECTION}.{part}", count) == places


def test_a_groups_gates_are_below_its_queries() -> None:
    """Each head of `q_proj` has its query above its gate."""
    q, k, v = (f"1.self_attn.{name}_proj.weight" for name in "qkv")
    assert rows(TensorNames("qwen3_next", QWEN), "2.self_attention.linear_qkv.weight", 96) == [
        *((q, 0, 8), (q, 16, 8), (q, 8, 8), (q, 24, 8), (k, 0, 8), (v, 0, 8)),
        *((q, 32, 8), (q, 48, 8), (q, 40, 8), (q, 56, 8), (k, 8, 8), (v, 8, 8)),
    ]


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_blocks_of_a_gpt_are_two_layers_of_a_hybrid_model(model_type: str) -> None:
    """A rank's own tensors say which it is."""
    values = {"num_layers": 3, "hidden_size": 64, "vocab_size": 5, "num_attention_heads": 4}
    mixer = "decoder.layers.4.input_layernorm.weight", "decoder.layers.4.self_attention.x"
    mlp = "decoder.layers.5.pre_mlp_layernorm.weight", "decoder.layers.5.mlp.x"
    for keys in (mixer, mlp, mixer + mlp):
        names = TensorNames(model_type, values, keys=keys)
        assert rows(names, "4.input_layernorm.weight", 8) == [("2.input_layernorm.weight", 0, 8)]
        norm = "2.post_attention_layernorm.weight"
        assert rows(names, "5.pre_mlp_layernorm.weight", 8) == [(norm, 0, 8)]
        assert names.rows("decoder.final_norm.weight", (), 8) == [Rows("model.norm.weight", 0, 8)]
    block = "decoder.layers.2.self_attention.x", "decoder.layers.2.mlp.x"
    names = TensorNames(model_type, values, keys=block)
    assert rows(names, "2.input_layernorm.weight", 8) == [("2.input_layernorm.weight", 0, 8)]


def test_experts_that_a_folder_stacks() -> None:
    """Published folders of Qwen3.5 hold a layer's experts in two tensors."""
    names = TensorNames("qwen3_5_moe", QWEN, STACKED)
    key = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    assert names.rows(key, (3,), 6) == [Rows(STACKED[0], 0, 6, expert=3, num_stacked=4)]
    block = Block(key, (3,), (2, 0), (2, 32), (6, 32), torch.float32)
    (span,) = row_spans(block, names)
    assert span.place == (3, slice(2, 4), slice(0, 32))
    # Whatever experts a rank has, the whole tensor is the same.
    assert hf_shapes([block], names) == {STACKED[0]: (4, 6, 32)}
    one_by_one = TensorNames("qwen3_5_moe", QWEN)
    gate, up = one_by_one.rows(key, (3,), 6)
    assert gate == Rows("model.layers.0.mlp.experts.3.gate_proj.weight", 0, 3)
    assert up == Rows("model.layers.0.mlp.experts.3.up_proj.weight", 0, 3)


def test_a_tensor_of_several_parts_has_the_shape_of_all() -> None:
    names = TensorNames("qwen3_next", QWEN)
    blocks = [
        Block(f"decoder.layers.0.{PROJECTION}.{part}", (), (0, 0), (n, 32), (n, 32), torch.float32)
        for part, n in {"query": 6, "key": 6, "value": 20, "z": 20, "beta": 4, "alpha": 4}.items()
    ]
    assert hf_shapes(blocks, names) == {
        "model.layers.0.linear_attn.in_proj_qkvz.weight": (52, 32),
        "model.layers.0.linear_attn.in_proj_ba.weight": (8, 32),
    }
    # The second of two tensor-parallel ranks has the second key head's rows.
    half = Block(f"decoder.layers.0.{PROJECTION}.z", (), (10, 0), (10, 32), (20, 32), torch.float32)
    (span,) = row_spans(half, names)
    assert (span.start, span.block_row, span.count) == (42, 0, 10)


def test_what_a_folder_may_have_in_addition() -> None:
    names = TensorNames("qwen3_5_moe", QWEN, [*STACKED, "mtp.fc.weight"], num_mtp_layers=1)
    for name, is_kept in (
        ("mtp.layers.0.input_layernorm.weight", True),
        ("model.visual.patch_embed.proj.weight", True),
    ):
        assert LeftOut(names, ()).may_be(name)
        assert names.is_kept(name) == is_kept
    own = "model.language_model.layers.2.input_layernorm.weight"
    assert not LeftOut(names, ()).may_be(own)
    text = TensorNames("qwen3_5_moe_text", QWEN, STACKED)
    assert not LeftOut(text, ()).may_be("model.visual.patch_embed.proj.weight")


def test_a_part_that_a_family_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"in_proj\.weight\.gamma"):
        rows(TensorNames("qwen3_next", QWEN), f"0.{PROJECTION}.gamma", 4)
    with pytest.raises(ConfigError, match="final_layernorm"):
        TensorNames("nemotron_h", NEMOTRON).rows("decoder.final_layernorm.weight", (), 8)
