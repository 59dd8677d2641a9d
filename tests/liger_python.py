"""Liger's Python on a CPU; `tools/liger_python.sh` brings it.

It needs Triton to be imported, for kernels that the tests do not run. Triton itself would be found
by torch and Megatron-Core too, and they would compile with it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

VERSION = "0.8.5"
_FOLDER = Path(__file__).resolve().parents[1] / ".liger" / VERSION

needs_liger = pytest.mark.skipif(
    not _FOLDER.is_dir(), reason="Liger's Python is absent: tools/liger_python.sh"
)


def liger_ops() -> Any:
    """Liger's module of the fused head, whose torch fallback runs on the CPU."""
    if "liger_kernel" not in sys.modules:
        # Before Triton seems to be there.
        import torch._inductor.standalone_compile  # noqa: F401

        finder = _Triton()
        sys.path.insert(0, str(_FOLDER))
        sys.meta_path.insert(0, finder)
        try:
            import liger_kernel.ops  # noqa: F401
        finally:
            sys.meta_path.remove(finder)
            sys.path.remove(str(_FOLDER))
            for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
                del sys.modules[name]
    from liger_kernel.ops import fused_linear_scaled_cross_entropy

    return fused_linear_scaled_cross_entropy


class _Triton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of Triton that hold a stand-in of every name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    __version__ = "3.2.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name


class _Name:
    """A decorator, the decorator of a decorator's arguments, or a constant."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        self = super().__new__(cls)
        self.value = args[0] if args else None  # type: ignore[attr-defined]
        return self

    def __call__(self, decorated: Any) -> Any:
        return decorated
