"""The docstring under each field of a dataclass, for documents and `--help`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def field_docs(cls: Any) -> dict[str, str]:
    """The docstring of each field on one line, inherited fields included.

    Python drops these strings at run time, so they are read from the source files of the dataclass
    and its bases.
    """
    bases = filter(dataclasses.is_dataclass, reversed(cls.__mro__))
    return {name: text for base in bases for name, text in _own_docs(base)}


def _own_docs(cls: Any) -> Iterator[tuple[str, str]]:
    # inspect.getsource(cls) parses the same file and takes several times as long.
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
