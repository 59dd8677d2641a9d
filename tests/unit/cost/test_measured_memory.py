"""The memory model against peaks that were measured on a GPU: docs/measured/one_gpu.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from megapack.config import load_config
from megapack.cost.memory import GIB
from megapack.job.config.sections import TrainConfig
from megapack.layout import Layout

pytestmark = pytest.mark.unit

_MODEL = re.compile(r"^### (\w+) on NVIDIA")
_TRACE = re.compile(r"samples, (\d+) tokens, .* the longest (\d+); rows of \d+\.$")
_WAY = re.compile(
    r"^\| (one sample|packed, te|packed, varlen) \| (\d+) \|.*\| ([\d.]+) \| [\d.]+ \|$"
)


class Cell(NamedTuple):
    """A line of a table."""

    config: str
    row_tokens: float
    """Of the longest row; of packed ones, which the planner makes about equal, of the mean one."""
    peak: float
    """GiB."""


def measured(repo_root: Path) -> Iterator[Cell]:
    config, tokens, longest = "", 0, 0
    for line in (
        (repo_root / "docs" / "measured" / "one_gpu.md").read_text(encoding="utf-8").splitlines()
    ):
        if match := _MODEL.match(line):
            config = match[1]
        elif match := _TRACE.search(line):
            tokens, longest = int(match[1]), int(match[2])
        elif match := _WAY.match(line):
            row = longest if match[1] == "one sample" else tokens / int(match[2])
            yield Cell(config, row, float(match[3]))


def test_measured_memory_is_that_of_the_prediction(
    repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of activations and head alone, in which the model may err; weights are counted exactly."""
    monkeypatch.chdir(tmp_path)
    cells = list(measured(repo_root))
    assert len(cells) == 12
    for name, tokens, peak in cells:
        config = load_config(repo_root / "configs" / f"{name}.yaml", [], TrainConfig)
        memory = config.memory_model()
        stage = memory.stage(Layout(), 0, live_tokens=tokens, row_tokens=tokens)
        # Two models were in memory, one for each attention, and no optimizer.
        others = 2 * (stage.parameters + stage.gradients)
        ratio = (peak * GIB - others) / (stage.activations + stage.head)
        assert 0.90 <= ratio <= 1.15, (name, tokens, peak, ratio)
