"""Imports modules that define Triton kernels where Triton is absent."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

_NEED_TRITON = (
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.inference.contexts.fused_kv_append_kernel",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
    "megatron.core.transformer.moe.ops.paged_stash",
)


class WithoutTriton(importlib.abc.MetaPathFinder):
    """Imports modules with Triton kernels where Triton is absent; their kernels cannot run.

    Only these modules see the stand-in: torch asks for Triton too, and must not find it.
    """

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _NEED_TRITON or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(  # type: ignore[method-assign]
                _execute_without_triton, execute
            )
        return spec


def _execute_without_triton(execute: Callable[[Any], None], module: Any) -> None:
    names = {name: _NoTriton(name) for name in ("triton", "triton.language")}
    vars(names["triton"])["language"] = names["triton.language"]
    sys.modules.update(names)
    try:
        execute(module)
    finally:
        for name in names:
            del sys.modules[name]


class _NoTriton(types.ModuleType):
    """Decorators that leave functions as they are, and types for annotations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _no_kernel


def _no_kernel(*args: Any, **kwargs: Any) -> Any:
    is_decorator = len(args) == 1 and not kwargs and callable(args[0])
    return args[0] if is_decorator else _no_kernel
