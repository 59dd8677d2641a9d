"""Models that would be wrong on rows made in a special way are refused before any collective."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megapack.errors import ConfigError
from megapack.model.attention.rotary_tables import RotaryTables
from megapack.model.attention.sdpa import PackedSDPA
from megapack.schedule.row_rules import Feature, check_rows

pytestmark = pytest.mark.unit

TEXTS: dict[Feature, str] = {
    "prefixes": "shared prefixes",
    "pieces": "samples in pieces",
    "wide": "rows over several ranks",
}


class TEDotProductAttention(torch.nn.Module):
    """Known by its name; importing Megatron's needs Transformer Engine."""


class OwnKernel(PackedSDPA):
    """Knows nothing of branches."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: Any) -> Tensor:
        return query


class Renamed(PackedSDPA):
    """Attends as its base does."""


def packed(kind: type[PackedSDPA] = PackedSDPA) -> PackedSDPA:
    made = SimpleNamespace(attention_dropout=0.0, kv_channels=8, context_parallel_size=1)
    return kind(made, 1, AttnMaskType.causal, "self")


def chunk(core: torch.nn.Module, embedding: str = "learned_absolute") -> Any:
    made: Any = torch.nn.Module()
    made.core_attention = core
    made.position_embedding_type = embedding
    return made


def check(made: Any, *features: Feature, is_training: bool = True, **changes: Any) -> None:
    sizes = {f"{name}_parallel_size": 1 for name in ("tensor_model", "context", "expert_model")}
    values = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "mtp_num_layers": None}
    config = SimpleNamespace(**{"cp_comm_type": None, **sizes, **values, **changes})
    check_rows([chunk(packed()), made], config, list(features), is_training=is_training)


@pytest.mark.parametrize("feature", TEXTS)
@pytest.mark.parametrize("core", [packed(), packed(Renamed), TEDotProductAttention()])
def test_other_models_are_accepted(core: torch.nn.Module, feature: Feature) -> None:
    check(chunk(core), feature, context_parallel_size=2, window_size=(128, 0), cp_comm_type="p2p")


@pytest.mark.parametrize("feature", TEXTS)
def test_kernels_and_positions_that_are_not_known_are_refused(feature: Feature) -> None:
    with pytest.raises(ConfigError, match=f"OwnKernel with {TEXTS[feature]}: it is not known"):
        check(chunk(packed(OwnKernel)), feature)
    message = f"'rope' .*with {TEXTS[feature]}: it finds positions from cu"
    with pytest.raises(ConfigError, match=message):
        check(chunk(packed(), "rope"), feature)


@pytest.mark.parametrize(
    ("feature", "changes", "message"),
    [
        ("prefixes", {"attention_dropout": 0.1}, "set it to 0, or plan.share_prefixes"),
        ("prefixes", {"hidden_dropout": 0.1}, "set it to 0, or plan.share_prefixes"),
        ("pieces", {"attention_dropout": 0.1}, "set it to 0, or plan.split"),
        ("prefixes", {"fp8_dot_product_attention": True}, ""),
        ("prefixes", {"fp8_multi_head_attention": True}, ""),
        ("pieces", {"mtp_num_layers": 1}, "set it to None, or plan.split"),
        ("wide", {"cp_comm_type": "a2a"}, "set 'p2p', or plan"),
        ("wide", {"cp_comm_type": ["p2p", "a2a"]}, "set 'p2p', or plan"),
    ],
)
def test_settings_are_refused(feature: Feature, changes: dict[str, Any], message: str) -> None:
    (name,) = changes
    with pytest.raises(ConfigError, match=f"{name}=.* with {TEXTS[feature]}.*{message}"):
        check(chunk(TEDotProductAttention()), feature, **changes)
    if "dropout" in name:
        check(chunk(packed()), feature, is_training=False, **changes)


def test_dropout_of_an_adapter_is_refused_in_training() -> None:
    made = chunk(packed())
    made.linear_qkv = torch.nn.Module()
    made.linear_qkv.dropout = torch.nn.Dropout(0.05)
    message = r"^linear_qkv.dropout \(dropout of 0.05\) with shared prefixes: .*set it to 0, or"
    with pytest.raises(ConfigError, match=message):
        check(made, "prefixes")
    check(made, "prefixes", is_training=False)
    check(made.eval(), "prefixes")
    check(made.train(), "pieces")


def test_rotations_by_the_length_of_a_sample_are_refused() -> None:
    made = chunk(packed())
    made.rotary_pos_emb = SimpleNamespace(tables=RotaryTables([8, 8], of_layers=(0, 1)))
    check(made, "prefixes")
    made.rotary_pos_emb.tables = RotaryTables([8, 8], short_tokens=4096)
    with pytest.raises(ConfigError, match=r"longrope from 4096 tokens with shared prefixes: "):
        check(made, "prefixes")
    check(made, "wide", "pieces")
