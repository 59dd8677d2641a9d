"""What a part of the check found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(kw_only=True)
class Found:
    """Results of a part.

    Attributes:
        line: what was found, for the report.
        failures: what is wrong, one line each; a part without any has passed.
        cases: figures and "status" by case.
        figures: other numbers.
    """

    line: str = ""
    failures: list[str] = field(default_factory=list)
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """Whether it has passed."""
        return FAILED if self.failures else PASSED
