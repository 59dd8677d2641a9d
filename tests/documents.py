"""Reads the Python blocks of the documents, and the names of megapack in their text."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))]

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"`(megapack(?:\.\w+)+)`")


def python_blocks(document: str) -> list[str]:
    """The blocks marked `python`, in order."""
    return _BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))


def names(document: str) -> list[str]:
    """Dotted names of megapack in backticks."""
    return _NAME.findall((ROOT / document).read_text(encoding="utf-8"))
