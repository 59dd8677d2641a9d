"""The cases that also run over Transformer Engine's layers, and those that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.dist.exactness.cases import ALL_CASES, HYBRID_CASES
from tests.dist.hf.hf_cases import HF_CASES, INDEXED, run_hf_cases, runnable
from tests.dist.rows.row_cases import ALL_CASES as ROW_CASES
from tests.dist.rows.row_cases import run_row_cases
from tests.dist.run_cases import run_cases
from tests.dist.vision.vision_cases import CASES as VISION_CASES
from tests.dist.vision.vision_cases import run_vision_cases
from tests.dist.vision.vision_cases import runnable as runnable_vision

Run = Callable[[Iterable[str], Path], dict[str, dict[str, Any]]]


def _run_plain(names: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    return run_cases(names, folder, folder)


def _rows(group: str) -> tuple[Mapping[str, Any], Run]:
    names = [name for name in ROW_CASES if name.startswith(f"{group}/")]
    cases = {name: ROW_CASES[name] for name in names if not ROW_CASES[name].mutation}
    return cases, run_row_cases


GRIDS: dict[str, tuple[Mapping[str, Any], Run]] = {
    "layouts and models": (ALL_CASES, _run_plain),
    "shared prefixes": _rows("prefixes"),
    "rows over several ranks": _rows("wide"),
    "samples in pieces": _rows("split"),
    "Hugging Face folders": ({name: HF_CASES[name] for name in runnable()}, run_hf_cases),
    "hybrid models": (HYBRID_CASES, _run_plain),
    "models with images": (
        {name: VISION_CASES[name] for name in runnable_vision()},
        run_vision_cases,
    ),
}
"""What a grid is about -> its cases, and what runs them."""
APART = ("hybrid models", "models with images")
"""Grids that run only with a pattern of their own."""


def refusal(grid: str, name: str) -> str:
    """Why Transformer Engine's layers do not run a case; "" if they do.

    `config.architecture` and `attention.choice` refuse these before a step.
    """
    cases, _ = GRIDS[grid]
    case = cases[name]
    kind = {getattr(case, key, "") for key in ("variant", "model", "family")}
    return "sparse attention" if kind & {*INDEXED, "dsa"} else ""


def runs_te(grid: str) -> list[str]:
    """The cases of a grid that Transformer Engine runs."""
    return [name for name in GRIDS[grid][0] if not refusal(grid, name)]
