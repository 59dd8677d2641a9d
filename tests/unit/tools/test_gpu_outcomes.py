"""What tests of a GPU found is in the file that the report is made from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu.outcomes import Outcomes

pytestmark = pytest.mark.unit


def report(name: str, outcome: str = "passed", longrepr: Any = None, when: str = "call") -> Any:
    """A phase of a test as pytest reports it."""
    is_so = {kind: kind == outcome for kind in ("passed", "failed", "skipped")}
    nodeid = f"tests/gpu/{name}"
    return SimpleNamespace(nodeid=nodeid, outcome=outcome, longrepr=longrepr, when=when, **is_so)


def failure(text: str) -> Any:
    return SimpleNamespace(reprcrash=SimpleNamespace(message=text))


def test_a_part_out_of_its_limits_gets_the_error_and_other_tests_their_outcomes(
    tmp_path: Path,
) -> None:
    path, outcomes = tmp_path / "results.json", Outcomes()
    outcomes.begin()
    outcomes.write(report("test_kernels.py::test_one[a b]"), path)
    # The jobs write the file anew.
    parts = {"fp32": {"gradient_error": 0.1}, "fp8": {"error": "its own"}, "bf16": {}}
    path.write_text(json.dumps({"te": parts}))
    for part in parts:
        outcomes.begin()
        outcomes.looked_at.append(("te", part))
        failed = ("passed",) if part == "bf16" else ("failed", failure("assert 0.1 < 1\n + more"))
        outcomes.write(report("test_gpu.py::test_part", "passed", when="setup"), path)
        outcomes.write(report("test_gpu.py::test_part", *failed), path)
    outcomes.begin()
    skip = ("file.py", 3, "Skipped: no such kernel")
    outcomes.write(report("test_kernels.py::test_two", "skipped", skip, when="setup"), path)
    outcomes.write(report("test_train.py::test_three", "failed", failure("OSError: full")), path)
    assert json.loads(path.read_text()) == {
        "te": {
            "fp32": {"gradient_error": 0.1, "error": "assert 0.1 < 1"},
            "fp8": {"error": "its own"},
            "bf16": {},
        },
        "pytest": {
            "test_kernels.py::test_one[a b]": {},
            "test_kernels.py::test_two": {"skipped": "no such kernel"},
            "test_train.py::test_three": {"error": "OSError: full"},
        },
    }
