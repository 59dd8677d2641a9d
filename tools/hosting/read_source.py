"""What a name is bound to, read from source text: nothing is imported.

    Sources([tree]).bindings("verl.utils.seqlen_balancing", "rearrange_micro_batches")

Hosts import CUDA packages that most machines do not have. Re-exports are followed, also `import *`.
A name that is bound under `if` or `try` has one binding per branch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Re-exports of re-exports; a circle of them would be followed for ever.
_DEEPEST = 20
# Packages that several distributions share: the first part says nothing about whose it is.
_SHARED = ("megatron",)


class NotRead(Exception):
    """A name that is absent, or that its source does not tell; says what was found."""


class Outside(NotRead):
    """A name that comes from a package which is not here."""


class Binding(NamedTuple):
    """A function, a class or an assigned value, where it stands."""

    module: str
    node: ast.stmt


class Sources:
    """Python packages in folders.

    Args:
        folders: as on `sys.path`.
        beside: folders for packages of which `folders` has nothing: what the host imports.
    """

    def __init__(self, folders: Sequence[Path], *, beside: Sequence[Path] = ()) -> None:
        self._folders = list(folders)
        self._beside = list(beside)
        self._tree = cache(self._parsed)

    def has(self, module: str) -> bool:
        """Whether a module or package, with or without `__init__.py`, is in the folders."""
        path = module.replace(".", "/")
        return any((f / f"{path}.py").is_file() or (f / path).is_dir() for f in self._folders)

    def bindings(self, module: str, name: str, depth: int = 0) -> list[Binding]:
        """What a global of a module is, in each branch that can be read.

        Raises:
            NotRead: absent, or no branch can be read.
        """
        if depth > _DEEPEST:
            raise NotRead(f"more than {_DEEPEST} re-exports")
        found: list[Binding] = []
        problem = NotRead("no such name")
        for statement in bound_in(self._tree(module).body, name):
            try:
                found += self._followed(module, statement, name, depth)
            except NotRead as error:
                problem = error
        if not found:
            found = self._from_stars(module, name, depth)
        if not found:
            raise problem
        return found

    def modules_with(self, package: str, name: str) -> list[str]:
        """Modules of a package that define a function, method or class of this name."""
        pattern = re.compile(rf"^\s*(?:async )?(?:def|class) {re.escape(name)}\b", re.MULTILINE)
        found = []
        for folder in self._folders:
            for path in sorted((folder / package.replace(".", "/")).rglob("*.py")):
                if pattern.search(path.read_text(encoding="utf-8", errors="replace")):
                    parts = path.relative_to(folder).with_suffix("").parts
                    found.append(".".join(part for part in parts if part != "__init__"))
        return found

    def _path(self, module: str) -> Path | None:
        path = module.replace(".", "/")
        # A module that the host no longer has must not be found in an installed release of it.
        for folder in self._folders if self.has(package_of(module)) else self._beside:
            for file in (folder / f"{path}.py", folder / path / "__init__.py"):
                if file.is_file():
                    return file
        return None

    def _parsed(self, module: str) -> ast.Module:
        path = self._path(module)
        if path is None:
            return ast.Module([], [])
        try:
            return ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError as error:
            raise NotRead(f"{path.name}, line {error.lineno}: {error.msg}") from None

    def _followed(self, module: str, statement: ast.stmt, name: str, depth: int) -> list[Binding]:
        if isinstance(statement, ast.ImportFrom):
            return self._imported(module, statement, name, depth)
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Name) and value.id != name:
            return self.bindings(module, value.id, depth + 1)
        return [Binding(module, statement)]

    def _imported(
        self, module: str, statement: ast.ImportFrom, name: str, depth: int
    ) -> list[Binding]:
        source = self._absolute(module, statement)
        if self._path(source) is None:
            raise Outside(f"an import from {source}, which is not here")
        names = {alias.asname or alias.name: alias.name for alias in statement.names}
        return self.bindings(source, names[name], depth + 1)

    def _from_stars(self, module: str, name: str, depth: int) -> list[Binding]:
        if name.startswith("_"):
            return []
        for statement in reversed(list(_stars(self._tree(module).body))):
            source = self._absolute(module, statement)
            try:
                return self.bindings(source, name, depth + 1)
            except NotRead:
                continue
        return []

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        """The module that `from ..x import` in a module names."""
        if not statement.level:
            return statement.module or ""
        path = self._path(module)
        is_package = path is not None and path.name == "__init__.py"
        parts = module.split(".")
        kept = parts[: len(parts) - statement.level + is_package]
        return ".".join([*kept, *filter(None, [statement.module])])


def package_of(module: str) -> str:
    """The package that one distribution ships.

    >>> package_of("verl.utils.model"), package_of("megatron.core.utils")
    ('verl', 'megatron.core')
    """
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] in _SHARED else 1])


def bound_in(body: Sequence[ast.stmt], name: str) -> list[ast.stmt]:
    """The statements of a module's or class's body that can have bound a name at its end."""
    found: list[ast.stmt] = []
    for statement in body:
        if _binds(statement, name):
            found = [statement]
            continue
        branches = _branches(statement)
        inside = [bound_in(branch, name) for branch in branches]
        if any(inside):
            # `if` without `else` keeps what was bound above, too.
            found = [*(found if not all(inside) else []), *(s for part in inside for s in part)]
    return found


def _binds(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return statement.name == name
    if isinstance(statement, ast.ImportFrom):
        return any((alias.asname or alias.name) == name for alias in statement.names)
    if isinstance(statement, ast.Import):
        return any((alias.asname or alias.name.split(".")[0]) == name for alias in statement.names)
    if isinstance(statement, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in statement.targets)
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return isinstance(statement.target, ast.Name) and statement.target.id == name
    return False


def _branches(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, ast.If):
        if "TYPE_CHECKING" in ast.unparse(statement.test):
            return [statement.orelse]
        return [statement.body, statement.orelse]
    if isinstance(statement, ast.Try):
        tried = [*statement.body, *statement.orelse, *statement.finalbody]
        return [tried, *(handler.body for handler in statement.handlers)]
    if isinstance(statement, (ast.With, ast.For, ast.While)):
        return [statement.body]
    return []


def _stars(body: Sequence[ast.stmt]) -> list[ast.ImportFrom]:
    found = []
    for statement in body:
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            found.append(statement)
        for branch in _branches(statement):
            found += _stars(branch)
    return found
