"""Outcomes of tests beside the figures of the jobs, in the file that the report is made from.

    {"te": {"fp32": {..., "error": "assert 0.1 < 1e-05"}}, "pytest": {"test_gpu_train.py::...": {}}}

A test of a part writes what failed into the part. Others are parts of "pytest": {} if they passed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Outcomes:
    """Collects the outcomes of a session.

    Attributes:
        looked_at: the parts of the test that runs, as (job, part).
    """

    looked_at: list[tuple[str, str]] = field(default_factory=list)
    _tests: dict[str, dict[str, str]] = field(default_factory=dict)

    def begin(self) -> None:
        """Call before a test."""
        self.looked_at.clear()

    def write(self, report: pytest.TestReport, path: Path) -> None:
        """Call after each phase of a test; `path` is rewritten, as the next test may be killed."""
        if report.when == "teardown" or (report.when == "setup" and report.passed):
            return
        results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if self.looked_at:
            for job, part in self.looked_at:
                found = results.get(job, {}).get(part)
                if report.failed and found is not None:
                    found.setdefault("error", _line(report))
        else:
            file, _, name = report.nodeid.partition("::")
            found = {} if report.passed else {_KEYS[report.outcome]: _line(report)}
            self._tests[f"{Path(file).name}::{name}"] = found
        # The jobs begin the file anew, after the first tests.
        results["pytest"] = self._tests
        path.write_text(json.dumps(results, indent=1), encoding="utf-8")


_KEYS = {"failed": "error", "skipped": "skipped"}


def _line(report: pytest.TestReport) -> str:
    """Why a test failed or was skipped."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).split("\n")[0]


OUTCOMES = Outcomes()
