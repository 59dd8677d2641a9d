"""Imports Transformer Engine's Python on stand-ins: the modules replaced, and lines of others.

| | in Transformer Engine | here |
|---|---|---|
| compiled module | `transformer_engine_torch` | `calls.KERNELS` and `enums` |
| Triton kernels | `transformer_engine.*.triton` | `permutation` |
| CUDA's libraries | loaded by `transformer_engine.common` | not loaded |
| device | "cuda", `is_cuda` | "cpu", `is_cpu` |
| dtypes of fused attention | bf16, fp16, fp8 | fp32 and fp64 too |

A line that a release has changed is an error at import, so that nothing runs half replaced.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import re
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megapack.cpu.te import (  # noqa: F401  (stand-ins register themselves)
    attention,
    enums,
    facts,
    gemm,
    lists,
    norms,
    permutation,
    ring,
    rope,
)
from megapack.cpu.te.calls import KERNELS, set_version, version
from megapack.errors import ConfigError

PACKAGE = "transformer_engine"
COMPILED = "transformer_engine_torch"
_PYTORCH = f"{PACKAGE}.pytorch"
_ATTENTION = f"{_PYTORCH}.attention.dot_product_attention"


def find_spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module of Transformer Engine, on stand-ins."""
    if name == COMPILED:
        _prepare()
        return importlib.machinery.ModuleSpec(name, _Made(_compiled_module))
    if name == f"{PACKAGE}.jax":
        return None
    if name == PACKAGE:
        _prepare()
    if name == f"{_PYTORCH}.triton.permutation":
        return importlib.machinery.ModuleSpec(name, _Made(_triton_permutation))
    if ".triton." in name or name == f"{_PYTORCH}.onnx_extensions":
        return importlib.machinery.ModuleSpec(name, _Made(dict))
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        spec.loader = _Edited(spec.loader.name, spec.loader.path)
    return spec


@functools.cache
def _prepare() -> None:
    """What must be set before the first module of Transformer Engine is imported."""
    release = importlib.metadata.version(PACKAGE)
    set_version(tuple(int(part) for part in re.findall(r"\d+", release)[:2]))
    # torch.compile would run a C++ compiler for minutes, again for every few lengths of rows.
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # It scripts functions at import, which torch 2.13 announces to remove.
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*")


# ------------------------------------------------------------------------------- modules made here


class _Absent(types.ModuleType):
    """A module whose missing names can be imported, and say when they are called what is absent."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(
                f"{self.__name__}.{name} has no stand-in on the CPU, see docs/cpu.md"
            )

        missing.__name__ = name
        return missing


class _Made(importlib.abc.Loader):
    """Loads a module whose names a function gives."""

    def __init__(self, names: Callable[[], dict[str, Any]]) -> None:
        self._names = names

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty module."""
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill the module."""
        vars(module).update(self._names())


# User buffers, which need CUDA. Transformer Engine subclasses the first at import.
_USER_BUFFERS = ("CommOverlapHelper", "CommOverlap", "CommOverlapP2P")


def _compiled_module() -> dict[str, Any]:
    names: dict[str, Any] = {
        name: value
        for name, value in vars(enums).items()
        if isinstance(value, type) and hasattr(value, "__members__")
    }
    names |= {name: type(name, (), {}) for name in _USER_BUFFERS}
    names |= {name: call for name, call in KERNELS.items() if name not in vars(permutation)}
    names["NVTE_Fused_Attn_Backend"] = enums.attention_backends(version())
    names["WaitedOnce"] = ring.WaitedOnce
    return {**names, "__all__": list(names)}


def _triton_permutation() -> dict[str, Any]:
    return {name: call for name, call in KERNELS.items() if name in vars(permutation)}


# ------------------------------------------------------------------------ lines that are changed


class _Edit(NamedTuple):
    """Text of a module's source, and what stands there instead, in some releases."""

    old: str
    new: str
    since: tuple[int, int] = (2, 9)
    before: tuple[int, int] = (3, 0)

    @property
    def applies(self) -> bool:
        """Whether it is for the release that runs."""
        return self.since <= version() < self.before


# In every module that has it.
_DEVICE = (
    ('torch.device("cuda", torch.cuda.current_device())', 'torch.device("cpu")'),
    ('torch.device("cuda", index=torch.cuda.current_device())', 'torch.device("cpu")'),
    (".is_cuda", ".is_cpu"),
    ('"cuda"', '"cpu"'),
    ("'cuda'", "'cpu'"),
    ("torch.cuda.is_available()", "True"),
    # That of `facts.get_cublasLt_version`.
    ("torch.version.cuda", '"13.0"'),
)
_HALF = "torch.bfloat16, torch.float16, torch.float8_e4m3fn]"
# In one module.
_EDITS: dict[str, tuple[_Edit, ...]] = {
    # CUDA's libraries and the compiled module are not loaded.
    f"{PACKAGE}.common": (
        _Edit('\nif "NVTE_PROJECT_BUILDING" not in os.environ or', "\nif False and"),
        _Edit(
            "def load_framework_extension(framework: str) -> None:\n",
            "def load_framework_extension(framework: str) -> None:\n    return\n",
        ),
    ),
    f"{_PYTORCH}.constants": (
        _Edit("\nTE_DType = {", "\nTE_DType = {torch.float64: tex.DType.kFloat64,", before=(2, 17)),
        # Since 2.17 the names of the compiled module's enumeration stand here, too.
        _Edit("\nTE_DType = {", "\nTE_DType = {torch.float64: DType.kFloat64,", since=(2, 17)),
        _Edit(
            "    kByte = int(tex.DType.kByte)\n",
            "    kByte = int(tex.DType.kByte)\n    kFloat64 = int(tex.DType.kFloat64)\n",
            since=(2, 17),
        ),
    ),
    f"{_ATTENTION}.utils": (
        _Edit(
            f"qkv_dtype not in [{_HALF}", f"qkv_dtype not in [torch.float64, torch.float32, {_HALF}"
        ),
    ),
    f"{_ATTENTION}.backends": (
        _Edit(
            "x.dtype in [torch.float16, torch.bfloat16]",
            "x.dtype in [torch.float64, torch.float32, torch.float16, torch.bfloat16]",
        ),
    ),
    # The ring's backward waits twice for each request.
    f"{_ATTENTION}.context_parallel": (
        _Edit(
            "    return send_recv_reqs\n",
            "    return [tex.WaitedOnce(request) for request in send_recv_reqs]\n",
        ),
    ),
}


class _Edited(importlib.machinery.SourceFileLoader):
    """Loads a module of Transformer Engine with its lines for the CPU.

    Compiled files stay those of the unchanged source, which another process may run on a GPU.
    """

    def get_code(self, fullname: str) -> types.CodeType | None:
        """The module's code."""
        path = self.get_filename(fullname)
        text = self.get_data(path).decode()
        edited = text
        for edit in filter(lambda edit: edit.applies, _EDITS.get(fullname, ())):
            if edit.old not in edited:
                raise ConfigError(
                    f"Transformer Engine {importlib.metadata.version(PACKAGE)} cannot run on the "
                    f"CPU: {fullname} has no {edit.old!r}; docs/cpu.md lists releases that can"
                )
            edited = edited.replace(edit.old, edit.new)
        for old, new in _DEVICE:
            edited = edited.replace(old, new)
        return super().get_code(fullname) if edited == text else compile(edited, path, "exec")
