"""Names in the documents exist. `tests/dist/train/test_document_blocks.py` runs code blocks."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import DOCUMENTS, ROOT, names, python_blocks

pytestmark = pytest.mark.unit


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    module = dotted
    rest = ""
    while True:
        try:
            found: object = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
    for name in filter(None, rest.split(".")):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def imported(block: str) -> list[str]:
    """Dotted names of the package that a block imports."""
    found = []
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.split(".")[0] == "megapack"]


def test_missing_names_are_noticed() -> None:
    assert exists("megapack.samples.SampleBatch.from_padded")
    assert not exists("megapack.samples.SampleBatch.from_nothing")
    assert imported("from megapack.loss import GRPO") == ["megapack.loss.GRPO"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_in_documents_exist(document: str) -> None:
    found = [*names(document), *(n for block in python_blocks(document) for n in imported(block))]
    assert [name for name in found if not exists(name)] == []


@pytest.mark.parametrize(
    "document",
    [
        "docs/concepts.md",
        "docs/configuration.md",
        "docs/agents.md",
        "docs/prefixes.md",
        "docs/dynamic_cp.md",
        "docs/operations.md",
    ],
)
def test_planning_blocks_run(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = python_blocks(document)
    assert blocks
    for block in blocks:
        exec(compile(block, document, "exec"), {"__name__": document})


@pytest.mark.parametrize(
    ("page", "code", "loaded"),
    [
        ('<a href="https://example.com">a link</a> <script src="own.js"></script>', 0, ""),
        ('<script src="https://example.com/x.js"></script>', 1, "https://example.com/x.js"),
        ('<link rel="stylesheet" href="//example.com/x.css">', 1, "//example.com/x.css"),
        ("<style>p { background: url(http://example.com/x) }</style>", 1, "http://example.com/x"),
        ('<pre class="mermaid">graph</pre>', 1, "a mermaid diagram"),
    ],
)
def test_pages_that_load_from_elsewhere_are_reported(
    page: str, code: int, loaded: str, tmp_path: Path
) -> None:
    (tmp_path / "index.html").write_text(page)
    command = [sys.executable, str(ROOT / "tools" / "check_site.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert loaded in done.stderr
