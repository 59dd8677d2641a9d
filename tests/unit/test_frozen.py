from __future__ import annotations

from typing import Any

import pytest
import torch

from megapack import frozen
from megapack.errors import ConfigError

pytestmark = pytest.mark.unit


class Embedding(torch.nn.Embedding):
    """Stands for a language-model embedding."""


class Chunk(torch.nn.Module):
    """The parts of a GPT chunk that freezing looks at."""

    share_embeddings_and_output_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(4, 2)
        self.head = torch.nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def trained(chunk: Any) -> list[str]:
    return [name for name, param in chunk.named_parameters() if param.requires_grad]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ((), ["embedding.weight", "head.weight", "head.bias"]),
        (("embedding.*",), ["head.weight", "head.bias"]),
        (("*.weight",), ["head.bias"]),
        (("head.[bw]*", "embedding.weight"), []),
    ],
)
def test_globs_choose_by_name(patterns: tuple[str, ...], expected: list[str]) -> None:
    chunk = Chunk()
    frozen.freeze([chunk], patterns)
    assert trained(chunk) == expected


def test_a_glob_that_matches_nothing_is_told() -> None:
    with pytest.raises(ConfigError, match=r"no parameter matches 'haed\.\*'"):
        frozen.freeze([Chunk()], ("head.*", "haed.*"))


@pytest.mark.parametrize(
    ("granularity", "asks"), [("full", True), ("selective", True), (None, False)]
)
def test_a_frozen_embedding_asks_for_gradients_under_recompute(
    granularity: str | None, asks: bool
) -> None:
    chunk = Chunk()
    frozen.freeze([chunk], ("embedding.*",))
    config = type("Config", (), {"recompute_granularity": granularity})
    frozen.keep_gradients_through_recompute([chunk], config)
    assert chunk.embedding(torch.tensor([1])).requires_grad is asks
    with torch.no_grad():
        assert not chunk.embedding(torch.tensor([1])).requires_grad
