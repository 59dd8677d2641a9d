"""All cases of rows, and what runs them.

A case's name is its group and its name there, such as wide/mla.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.dist.rows import hybrid_cases, prefix_cases, split_cases, streams_cases, wide_cases
from tests.dist.rows.row_case import RowCase
from tests.dist.run_cases import run_by_world
from tests.dist.spawn import checked_job

GROUPS: dict[str, Any] = {
    "prefixes": prefix_cases,
    "wide": wide_cases,
    "split": split_cases,
    "hybrid": hybrid_cases,
    "streams": streams_cases,
}
ALL_CASES: dict[str, RowCase] = {
    f"{group}/{name}": case
    for group, module in GROUPS.items()
    for name, case in (module.GRID | module.SPECIAL).items()
}
HYBRID = [name for name in ALL_CASES if name.startswith("hybrid/")]
"""Those of hybrid models; their plans are those of other groups' cases."""
STREAMS = [name for name in ALL_CASES if name.startswith("streams/")]
"""Those of models with hyper-connections, likewise."""
TESTED = [f"{group}/{name}" for group, module in GROUPS.items() for name in module.TESTED]
"""The cases of the tests; tools/exactness.py runs all that are not mutated."""


def run_row_cases(
    names: Iterable[str], folder: Path, kinds: Mapping[str, Iterable[str]] | None = None
) -> dict[str, dict[str, Any]]:
    """Run cases and their reference; results by case and objective.

    Args:
        kinds: the objectives of each case; None = all.
    """
    names = list(names)
    reference = str(folder / "reference.pt")
    suffixes = {name: f":{','.join(kinds[name])}" if kinds else "" for name in names}
    worlds = {f"{name}{suffix}": ALL_CASES[name].world for name, suffix in suffixes.items()}
    checked_job(1, "tests.dist.rows.row_reference", [reference, *worlds], timeout_s=600, te="")
    return run_by_world("tests.dist.rows.row_worker", worlds, reference, folder, timeout_s=600)
