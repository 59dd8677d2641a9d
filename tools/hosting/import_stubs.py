"""Stand-ins for the heavy packages that a host imports and a CPU run of its step does not need.

    import_stubs.install("sglang", "wandb")
    import sglang.srt.utils        # any submodule, any name in it

Only packages that are absent are replaced: an installed one is imported as it is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

# Hosts compare versions of what they import; a high one passes.
_VERSION = "99.0.0"


def install(*packages: str) -> tuple[str, ...]:
    """Replace packages that cannot be imported, in this process; returns their names.

    Args:
        packages: names such as `sglang`, or of a part such as `megatron.bridge`.
    """
    absent = tuple(name for name in packages if not _is_installed(name))
    # Last: what is installed later still comes first.
    sys.meta_path.append(_Finder(absent))
    return absent


def _is_installed(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that contains it is absent
        return False


class _AnyClass(type):
    """Classes whose every attribute is another such class, and which stand in unions of types."""

    def __getattr__(cls, name: str) -> Any:
        return _any_class(_not_special(name))

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def _any_class(name: str) -> Any:
    """A class that can be called, subclassed, subscripted, and used as a decorator."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """Takes any arguments."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if is_decorator else self

    def attribute(self: Any, name: str) -> Any:
        return _any_class(_not_special(name))

    members = {"__init__": init, "__call__": call, "__getattr__": attribute, "__module__": __name__}
    return _AnyClass(name, (object,), members)


def _not_special(name: str) -> str:
    # Python asks objects for special methods; an answer would change what they are.
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return name


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{_not_special(name)}"
        value = sys.modules.get(full) or _any_class(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == package or name.startswith(f"{package}.") for package in self._packages):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []
        module.__version__ = _VERSION  # type: ignore[attr-defined]
