"""Models that would be wrong on rows with shared prefixes are refused before any collective."""

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
from megapack.schedule.row_rules import check_rows

pytestmark = pytest.mark.unit


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


def config(**changes: Any) -> SimpleNamespace:
    values = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "context_parallel_size": 1}
    return SimpleNamespace(**{**values, **changes})


def check(made: Any, is_training: bool = True, **changes: Any) -> None:
    check_rows([chunk(packed()), made], config(**changes), ["prefixes"], is_training=is_training)


@pytest.mark.parametrize("core", [packed(), packed(Renamed), TEDotProductAttention()])
def test_other_models_are_accepted(core: torch.nn.Module) -> None:
    check(chunk(core))


@pytest.mark.parametrize("name", ["attention_dropout", "hidden_dropout"])
def test_dropout_is_refused_in_training(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name}=0.1 with shared .*set it to 0, or plan.share_prefixes"
    ):
        check(chunk(packed()), **{name: 0.1})
    check(chunk(packed()), is_training=False, **{name: 0.1})


def test_dropout_of_an_adapter_is_refused_in_training() -> None:
    made = chunk(packed())
    made.linear_qkv = torch.nn.Module()
    made.linear_qkv.dropout = torch.nn.Dropout(0.05)
    message = (
        r"^linear_qkv.dropout \(dropout of 0.05\) with shared prefixes: .*set it to 0, or plan."
    )
    with pytest.raises(ConfigError, match=message):
        check(made)
    check(made, is_training=False)
    check(made.eval())
    check_rows([made.train()], config(), ["pieces"], is_training=True)


def test_rotations_by_the_length_of_a_sample_are_refused() -> None:
    made = chunk(packed())
    made.rotary_pos_emb = SimpleNamespace(tables=RotaryTables([8, 8], of_layers=(0, 1)))
    check(made)
    made.rotary_pos_emb.tables = RotaryTables([8, 8], short_tokens=4096)
    with pytest.raises(ConfigError, match=r"longrope from 4096 tokens with shared prefixes: "):
        check(made)
    check_rows([made], config(cp_comm_type=None), ["wide", "pieces"], is_training=True)


def test_positions_that_follow_from_cu_seqlens_are_refused() -> None:
    message = "Module with position_embedding_type='rope' .*: it finds positions from cu"
    with pytest.raises(ConfigError, match=message):
        check(chunk(packed(), "rope"))


def test_a_kernel_that_does_not_know_branches_is_refused() -> None:
    with pytest.raises(ConfigError, match="OwnKernel with shared prefixes: it is not known"):
        check(chunk(packed(OwnKernel)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention=True with shared"),
        ({"fp8_multi_head_attention": True}, "fp8_multi_head_attention=True with shared"),
    ],
)
def test_what_transformer_engine_does_not_run_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(chunk(TEDotProductAttention()), **changes)


@pytest.mark.parametrize("core", [packed(), TEDotProductAttention()])
def test_prefixes_are_shared_with_context_parallelism_and_windows(core: torch.nn.Module) -> None:
    check(chunk(core), context_parallel_size=2, window_size=(128, 0), softmax_type="learnable")
