"""Models that would be wrong on rows over several DP ranks are refused before any collective."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapack.errors import ConfigError
from megapack.schedule.row_rules import Feature, check_rows
from tests.unit.schedule.test_checks_of_prefixes import (
    OwnKernel,
    TEDotProductAttention,
    chunk,
    packed,
)

pytestmark = pytest.mark.unit


def check(made: Any, *, shares_prefixes: bool = False, **changes: Any) -> None:
    sizes = {f"{name}_parallel_size": 1 for name in ("tensor_model", "context", "expert_model")}
    dropouts = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    config = SimpleNamespace(**{"cp_comm_type": None, **sizes, **dropouts, **changes})
    features: list[Feature] = ["prefixes", "wide"] if shares_prefixes else ["wide"]
    check_rows([made], config, features, is_training=True)


@pytest.mark.parametrize("core", [packed(), TEDotProductAttention()])
def test_other_models_are_accepted(core: torch.nn.Module) -> None:
    check(chunk(core), cp_comm_type="p2p")
    check(chunk(core), shares_prefixes=True, window_size=(128, 0))


@pytest.mark.parametrize("kinds", ["a2a", ["p2p", "a2a"]])
def test_exchanges_that_divide_heads_are_refused(kinds: object) -> None:
    with pytest.raises(
        ConfigError, match=r"cp_comm_type='a2a' with rows over several ranks: .*set 'p2p', or plan"
    ):
        check(chunk(TEDotProductAttention()), cp_comm_type=kinds)


def test_positions_that_follow_from_cu_seqlens_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'rope' .*with rows over several ranks: it finds positions"
    ):
        check(chunk(packed(), "rope"))


def test_a_kernel_that_does_not_know_the_rows_ranks_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="OwnKernel with rows over several ranks: it is not known"
    ):
        check(chunk(packed(OwnKernel)))
