"""Replacing names of another training framework by megapack's, politely.

    patching.apply("slime")      # before or after slime is imported
    patching.status()            # what is replaced, what waits for its import, who holds old names
    patching.revert("slime")

Opt-in, idempotent and reversible. A name is replaced only if its signature is an expected one;
else `PatchError` says what was expected and what was found, and nothing is replaced. Where the
host's module is not imported yet, this happens right behind its import (`wrapt`'s post-import
hooks), and the error comes out of that import.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from megapack.errors import PatchError
from megapack.patching.files import load_patches
from megapack.patching.target import Patch, Status

__all__ = ["Finding", "Status", "apply", "check", "revert", "status"]

# Reentrant: putting a replacement imports it, and imports call hooks.
_LOCK = threading.RLock()
_ACTIVE: dict[str, list[Patch]] = {}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Whether one name of a host can be replaced."""

    target: str
    """Dotted path of the name."""
    problem: str
    """What stands against it; empty if nothing does."""


def apply(host: str) -> tuple[Status, ...]:
    """Replace the names of a host: now where its modules are imported, else right behind that.

    Call it in every process: children do not inherit it (see `startup`). Twice is as once.

    Args:
        host: one that megapack ships patches for, or the path of a patch file, ending in `.yaml`.

    Raises:
        ConfigError: no such host or file.
        PatchError: an imported module of the host is not as expected; nothing was replaced.
    """
    file = load_patches(host)
    with _LOCK:
        if file.host not in _ACTIVE:
            patches = [Patch(file, entry) for entry in file.patches]
            _refuse_doubles(patches)
            for patch in patches:
                patch.verify()
            _ACTIVE[file.host] = patches
            for patch in patches:
                if patch.is_imported:
                    patch.put()
            for name in sorted({name for patch in patches for name in patch.way}):
                if name not in sys.modules:
                    _watch(name)
        return tuple(patch.status() for patch in _ACTIVE[file.host])


def revert(host: str) -> None:
    """Put a host's own names back; without `apply` before, nothing happens."""
    with _LOCK:
        for patch in reversed(_ACTIVE.pop(load_patches(host).host, [])):
            if patch.done:
                patch.take_back()


def status() -> tuple[Status, ...]:
    """All patches that were asked for in this process."""
    with _LOCK:
        return tuple(patch.status() for patch in _all_patches())


def check(host: str) -> tuple[Finding, ...]:
    """Import the modules of a host and say which of its names can be replaced; replaces nothing.

    Raises:
        ConfigError: no such host or file.
    """
    file = load_patches(host)
    return tuple(_finding(Patch(file, entry)) for entry in file.patches)


def _finding(patch: Patch) -> Finding:
    problem = ""
    try:
        importlib.import_module(patch.entry.module)
        # A name that is replaced was right before it was.
        if not any(other.done for other in _all_patches() if _same_target(patch, other)):
            patch.verify()
    except Exception as error:  # a host's import may raise anything
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Finding(target=patch.entry.dotted, problem=problem)


def _refuse_doubles(patches: list[Patch]) -> None:
    for patch in patches:
        for other in _all_patches():
            if _same_target(patch, other):
                raise PatchError(
                    f"{patch.entry.dotted} is replaced by the patches for {other.file.host} "
                    f"already; revert these before {patch.file.host}"
                )


def _watch(name: str) -> None:
    from wrapt import register_post_import_hook

    register_post_import_hook(_imported, name)


def _imported(module: ModuleType) -> None:
    """Behind the import of a module of a host, or of a package above one."""
    with _LOCK:
        patches = [patch for patch in _all_patches() if module.__name__ in patch.way]
        try:
            for patch in patches:
                patch.verify()
        except Exception:
            # This import fails with the error, and so shall the next one. As long as the module
            # is there, wrapt would take it for imported.
            sys.modules.pop(module.__name__, None)
            _watch(module.__name__)
            raise
        for patch in patches:
            if patch.entry.module == module.__name__:
                patch.put()


def _all_patches() -> Iterator[Patch]:
    return (patch for patches in _ACTIVE.values() for patch in patches)


def _same_target(one: Patch, other: Patch) -> bool:
    return one.entry.target == other.entry.target
