"""The table of claims is that of the reports in docs/measured, and says what they found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import make_gpu_claims
from tools.make_gpu_claims import (
    claims_text,
    one_gpu_parts,
    rank_parts,
    read_claims,
    read_reports,
)
from tools.pages.measured import MEASURED

pytestmark = pytest.mark.unit

CLAIMS = """\
claims:
  - {id: exact, claim: rows are exact, read: yes, rehearsed: check, one_gpu: [te/fp32, te/bf16],
     seen: "yes, at first", ranks: ['exact: pp\\d fp32']}
  - {id: wide, claim: wide rows, read: yes, rehearsed: no, ranks: ["exact: wide", steps]}
  - {id: memory, claim: memory, read: "-", rehearsed: no, one_gpu: [models/qwen3_4b_gpu1],
     is_measured: true}
"""


PASSED = {"fp32": {"gradient_error": 1e-6}, "bf16": {"gradient_error": 1e-3}}


def one_gpu_report(
    te: dict[str, Any] = PASSED, pytest: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """As tools/bench_gpu.py writes it, in short, with these parts and outcomes of tests."""
    model = {"model": "qwen3_4b_gpu1", "device": "NVIDIA H200", "cells": [{"ways": {"padded": {}}}]}
    return {
        "date": "2026-12-01",
        "rehearsed": False,
        "tests": {"te": te, "pytest": pytest or {}},
        "models": [model],
        **changes,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "claims.yaml").write_text(CLAIMS)
    return tmp_path


def cells(folder: Path, **reports: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The cells of one GPU and of several ranks by claim, with these reports in the folder."""
    for name, report in reports.items():
        (folder / f"{name}.json").write_text(json.dumps(report))
    claims = read_claims(folder / "claims.yaml", one_gpu_parts(), rank_parts())
    table, _, _ = claims_text(claims, read_reports(folder)).partition("\n\n")
    found = {}
    for claim, row in zip(claims, table.splitlines()[2:], strict=True):
        *_, one_gpu, ranks = row.removesuffix(" |").split(" | ")
        found[claim.id] = (one_gpu, ranks)
    return found


def test_the_tables_are_up_to_date() -> None:
    written = make_gpu_claims.written_claims()
    assert make_gpu_claims.claims_of(MEASURED) == written, "run tools/make_gpu_claims.py"
    page = make_gpu_claims.PAGE.read_text(encoding="utf-8")
    assert make_gpu_claims.page_text() == page, "run tools/make_gpu_claims.py"


def test_a_report_changes_the_cells_of_its_parts(folder: Path) -> None:
    assert cells(folder, mine=one_gpu_report()) == {
        "exact": ("yes: NVIDIA H200", "no"),
        "wide": ("-", "no"),
        "memory": ("measured: NVIDIA H200", "-"),
    }


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("te/bf16", "te/bf17", r"exact.one_gpu: no check has te/bf17; .*te/bf16"),
        ("te/bf16", "fa/bf16", r"no check has fa/bf16"),
        ("steps", "stops", r"wide.ranks: no check has stops; .*steps"),
        ('"exact: wide"', '"exact: wider"', r"no check has exact: wider"),
        ('"exact: wide"', '"exacts: wide"', r"no check has exacts: wide"),
        ("id: wide", "id: exact", "two claims have the id exact"),
    ],
)
def test_names_that_no_check_has_are_refused(folder: Path, old: str, new: str, says: str) -> None:
    (folder / "claims.yaml").write_text(CLAIMS.replace(old, new))
    with pytest.raises(ValueError, match=says):
        cells(folder)
