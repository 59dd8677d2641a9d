"""The text under each field of a dataclass, for documents and `--help`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def field_docs(cls: Any) -> dict[str, str]:
    """Per field the text under it, on one line; inherited fields too.

    Reads the source of the modules that define the dataclass and its bases.
    """
    bases = filter(dataclasses.is_dataclass, reversed(cls.__mro__))
    return {name: text for base in bases for name, text in _own_docs(base)}


def _own_docs(cls: Any) -> Iterator[tuple[str, str]]:
    # inspect.getsource(cls) would parse the same file, and take several times as long.
    module = ast.parse(Path(inspect.getfile(cls)).read_text(encoding="utf-8"))
    classes = (node for node in module.body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in classes if node.name == cls.__name__)
    for field, text in itertools.pairwise(body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                yield name, " ".join(words.split())
