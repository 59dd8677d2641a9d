"""Which Hugging Face rows Megatron's tensors consist of."""

from __future__ import annotations

import pytest

from megapack.errors import ConfigError
from megapack.job.hf.names import Rows, TensorNames
from megapack.job.hf.unused import LeftOut

pytestmark = pytest.mark.unit

VALUES = {
    "num_layers": 3,
    "hidden_size": 64,
    "vocab_size": 5,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
}


def test_a_tensor_that_a_family_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mtp\.layers\.0.*qwen3.*mtp_num_layers"):
        TensorNames("qwen3", VALUES).rows("mtp.layers.0.eh_proj.weight", (), 8)


@pytest.mark.parametrize(
    ("model_type", "begin", "names"),
    [
        ("glm4_moe", "model.layers.4.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
        (
            "mimo",
            "model.mtp_layers.1.",
            ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        ),
    ],
)
def test_the_second_depth_of_multi_token_prediction(
    model_type: str, begin: str, names: tuple[str, ...]
) -> None:
    table = TensorNames(model_type, VALUES)
    parts = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    for part, name in zip(parts, names, strict=True):
        (found,) = table.rows(f"mtp.layers.1.{part}.weight", (), 8)
        swaps = (model_type, part) == ("mimo", "eh_proj")
        assert found == Rows(f"{begin}{name}.weight", 0, 8, swaps_halves=swaps)
    for layer in ("transformer_layer", "mtp_model_layer.layers.0"):
        found = table.rows(f"mtp.layers.1.{layer}.self_attention.linear_proj.weight", (), 8)
        assert found == [Rows(f"{begin}self_attn.o_proj.weight", 0, 8)]
    with pytest.raises(ConfigError, match="other_norm"):
        table.rows("mtp.layers.1.other_norm.weight", (), 8)


def test_a_value_model_exports_no_multi_token_prediction() -> None:
    copied = "model.layers.3.embed_tokens.weight"
    for is_value_model in (False, True):
        names = TensorNames(
            "glm4_moe",
            VALUES,
            [copied, "model.layers.3.eh_proj.weight"],
            is_value_model=is_value_model,
            num_mtp_layers=1,
        )
        expected = [] if is_value_model else [copied]
        assert names.copies("model.embed_tokens.weight") == expected
        assert names.copies("model.norm.weight") == []
        assert names.is_kept("model.layers.3.enorm.weight") is not is_value_model
        assert LeftOut(names, ()).may_be("model.layers.3.enorm.weight")


OF_DEPTH = "model.layers.3.self_attn.q_proj.weight"


@pytest.mark.parametrize("stored", [[OF_DEPTH], [OF_DEPTH, "model.layers.3.eh_proj.weight"]])
def test_a_layer_without_a_projection_is_no_multi_token_prediction(stored: list[str]) -> None:
    names = TensorNames("deepseek_v3", VALUES, stored, num_mtp_layers=1)
    assert LeftOut(names, ()).may_be(OF_DEPTH) is (len(stored) == 2)


COPIES = [
    "model.layers.3.embed_tokens.weight",
    "model.layers.3.shared_head.head.weight",
]


@pytest.mark.parametrize(
    ("name", "family", "may_be"),
    [
        ("lm_head.weight", "qwen3", True),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "llama", True),
        ("model.rotary_emb.inv_freq", "llama", True),
        ("vision.rotary_emb.inv_freq", "llama", False),
        ("model.layers.2.eh_proj.weight", "deepseek_v3", False),
        ("model.layers.3.eh_proj.weight", "deepseek_v3", True),
        ("model.layers.4.eh_proj.weight", "deepseek_v3", False),
        ("model.layers.3.self_attn.q_proj.weight", "llama", False),
        ("model.mtp_layers.0.input_proj.weight", "mimo", True),
        ("model.mtp_layers.1.input_proj.weight", "mimo", False),
        ("model.mtp_layers.0.input_proj.weight", "qwen3", False),
        ("mtp.layers.0.mlp.up_proj.weight", "qwen3", False),
        ("mtp.fc.weight", "llama", False),
        ("model.layers.0.self_attn.q_proj.bias", "qwen3", False),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "qwen3", False),
        ("score.weight", "qwen3", False),
        ("language_model.lm_head.weight", "qwen3", False),
        ("layers.0.mlp.up_proj.weight", "qwen3", False),
    ],
)
def test_what_a_folder_may_have_in_addition(name: str, family: str, may_be: bool) -> None:
    stored = ["model.layers.3.eh_proj.weight", "model.mtp_layers.0.input_proj.weight"]
    names = TensorNames(family, VALUES, stored, num_mtp_layers=1)
    assert LeftOut(names, ()).may_be(name) is may_be
    assert not names.is_kept(name) or may_be


def test_of_a_trained_depth_a_folder_may_have_copies() -> None:
    stored = [*COPIES, "model.layers.3.eh_proj.weight"]
    names = TensorNames("deepseek_v3", VALUES, stored, num_mtp_layers=1)
    model = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.3.enorm.weight")
    untrained, trained, tied = (
        LeftOut(names, own) for own in (model[:2], model, (model[0], model[2]))
    )
    for copy, own in zip(COPIES, model[:2], strict=True):
        assert untrained.may_be(copy)
        assert untrained.original(copy) is None
        assert trained.original(copy) == own
        assert tied.original(copy) == model[0]
    assert untrained.may_be("model.layers.3.self_attn.other.weight")
    assert not trained.may_be("model.layers.3.self_attn.other.weight")
