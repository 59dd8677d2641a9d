"""Import paths of earlier versions: `megapack.gpt` is `megapack.job.gpt` now.

`import megapack` registers a finder with which an old path loads the new module: one object under
both names.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_NEW = {
    "megapack.checkpoint": "megapack.job.checkpoint",
    "megapack.config.model": "megapack.job.config.model",
    "megapack.config.sections": "megapack.job.config.sections",
    "megapack.data": "megapack.job.data",
    "megapack.gpt": "megapack.job.gpt",
    "megapack.hf": "megapack.job.hf",
    "megapack.patching": "megapack.hosts.patching",
    "megapack.startup": "megapack.hosts.startup",
}
"""Documented paths, with the modules below them."""


class MovedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of `sys.meta_path` for old paths, and for no others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of an old path; None leaves the name to the other finders."""
        if new_name(name) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty module, which `exec_module` replaces."""
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Put the new module in the old one's place; the import statement reads it from there."""
        sys.modules[module.__name__] = importlib.import_module(str(new_name(module.__name__)))


def new_name(name: str) -> str | None:
    """Where a module is now, if it has moved.

    >>> new_name("megapack.gpt.specs")
    'megapack.job.gpt.specs'
    >>> new_name("megapack.plan") is None
    True
    """
    for old, new in _NEW.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def register() -> None:
    """Put the finder before Python's own, which would load `megapack.gpt.specs` a second time from
    the folder of the new `megapack.job.gpt`. Idempotent."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())
