"""docs/maintainers/reliability.md names tests that exist, and every promise names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit


PAGE = "docs/maintainers/reliability.md"


def test_tests_named_by_promises_exist(repo_root: Path) -> None:
    text = (repo_root / PAGE).read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text))
    assert len(named) > 20
    for path, name in sorted(named):
        tree = ast.parse((repo_root / path).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path}::{name}"


def test_every_promise_names_a_test(repo_root: Path) -> None:
    lines = (repo_root / PAGE).read_text().splitlines()
    rows = 0
    for header in (i for i, line in enumerate(lines) if line == "| promise | held by |"):
        for line in lines[header + 2 :]:
            if not line.startswith("|"):
                break
            rows += 1
            assert "::test_" in line.split("|")[-2], line
    assert rows > 20
