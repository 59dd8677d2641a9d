"""The keys that docs/metrics.md lists."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


def documented(*sections: str) -> set[str]:
    """Keys in the tables under these headings."""
    keys = {}
    for section in DOCUMENT.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        keys[heading] = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    return {key for section in sections for key in keys[section]}
