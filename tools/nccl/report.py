"""The report of the check of several ranks, as Markdown."""

from __future__ import annotations

from typing import Any

from tools.benching.gpu_report import report_head
from tools.nccl.found import FAILED

ON_ONE = "Ranks share a GPU and take turns on it: no time of this report says how fast a job is."


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown, with the head of a measured file."""
    where = f"{report['ranks']} ranks on {report['num_gpus']} x {report['device']}"
    what = f"What several ranks do over NCCL, by {report['way'] or 'no way'}."
    if report["rehearsed"]:
        what = f"{what} Over gloo it shows nothing of NCCL."
    elif report["ranks"] > report["num_gpus"]:
        what = f"{what} {ON_ONE}"
    lines = [report_head(report, f"Check of {where}", what).text()]
    lines += ["| part | shows | status | found | seconds |", "|---|---|---|---|---|"]
    for part in report["parts"]:
        cells = [str(part[name]) for name in ("name", "shows", "status", "line", "seconds")]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    for part in report["parts"]:
        lines += _tables(part)
    lines += ["", "### What failed", ""]
    failed = [f"- {part['name']}: {text}" for part in report["parts"] for text in part["failures"]]
    return "\n".join([*lines, *(failed or ["- nothing"])]) + "\n"


def _tables(part: dict[str, Any]) -> list[str]:
    cases = part["cases"]
    if not cases:
        return []
    names = dict.fromkeys(name for case in cases.values() for name in case)
    columns = [name for name in names if name not in ("status", "line", *_LEFT_OUT)]
    lines = ["", f"### {part['name']}", "", f"| case | status | {' | '.join(columns)} |"]
    lines.append("|---" * (2 + len(columns)) + "|")
    for name, case in cases.items():
        cells = [_number(case.get(column)) for column in columns]
        lines.append(f"| {name} | {case['status']} | {' | '.join(cells)} |")
    return lines


# The losses are compared; the report is about their difference.
_LEFT_OUT = ("loss", "expected_loss", "gradient_norm")


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if abs(value) < 0.01 or abs(value) >= 1e4 else f"{value:.2f}"
    return "-" if value is None else str(value)


def has_failed(report: dict[str, Any]) -> bool:
    """Whether any part has failed."""
    return any(part["status"] == FAILED for part in report["parts"])
