"""Models that would be wrong on samples in pieces are refused before any collective."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapack.errors import ConfigError
from megapack.schedule.row_rules import check_rows
from tests.unit.schedule.test_checks_of_prefixes import (
    OwnKernel,
    TEDotProductAttention,
    chunk,
    packed,
)

pytestmark = pytest.mark.unit


def check(made: Any, *, is_training: bool = True, **changes: Any) -> None:
    defaults = {"attention_dropout": 0.0, "mtp_num_layers": None, "context_parallel_size": 1}
    config = SimpleNamespace(**{**defaults, **changes})
    check_rows([made], config, ["pieces"], is_training=is_training)


@pytest.mark.parametrize("core", [packed(), TEDotProductAttention()])
def test_other_models_are_accepted(core: torch.nn.Module) -> None:
    check(chunk(core))
    check(chunk(core), context_parallel_size=2, window_size=(128, 0))


def test_dropout_of_attention_is_refused_in_training() -> None:
    with pytest.raises(
        ConfigError, match=r"attention_dropout=0.1 with samples .*set it to 0, or plan.split"
    ):
        check(chunk(packed()), attention_dropout=0.1)
    check(chunk(packed()), attention_dropout=0.1, is_training=False)


def test_multi_token_prediction_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"mtp_num_layers=1 with samples .*set it to None, or plan.split"
    ):
        check(chunk(packed()), mtp_num_layers=1)


def test_kernels_and_positions_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match="OwnKernel with samples in pieces: it is not known"):
        check(chunk(packed(OwnKernel)))
    with pytest.raises(ConfigError, match=r"with samples in pieces: it finds positions from cu"):
        check(chunk(packed(), "rope"))
