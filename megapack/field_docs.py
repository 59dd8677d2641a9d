"""The text under each field of a dataclass, for documents and `--help`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any


def field_docs(cls: Any) -> dict[str, str]:
    """Per field the text under it, on one line; inherited fields too. Reads the source."""
    bases = filter(dataclasses.is_dataclass, reversed(cls.__mro__))
    return {name: text for base in bases for name, text in _own_docs(base)}


def _own_docs(cls: Any) -> Iterator[tuple[str, str]]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for field, text in itertools.pairwise(tree.body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                yield name, " ".join(words.split())
