"""Plans read from and written to files."""

from __future__ import annotations

from pathlib import Path

from megapack.base.files import read_text, write_output
from megapack.errors import PlanError
from megapack.plan.plan import Plan


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a JSON file.

    Raises:
        PlanError: the file cannot be read or is not a plan; the message says where.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise PlanError(f"{path}: cannot be read ({reason}); give a plan.json") from None
    try:
        return Plan.from_json(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan's JSON, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_output(path, plan.to_json() + "\n")
