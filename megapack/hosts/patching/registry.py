"""Apply and revert the patches of hosts in this process, and report their state.

    patching.apply("slime")      # before or after slime is imported; with what slime's file brings
    patching.status()            # replaced names, names that wait for an import, stale copies
    patching.revert("slime")

Opt-in, idempotent and reversible. A name is replaced only if its signature is one of the expected
ones; otherwise `PatchError` gives the expected and the actual signature, and nothing is replaced.
If the host's module is not imported yet, its names are verified and replaced right after its import
(`wrapt`'s post-import hooks), and that import raises the error.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megapack.errors import PatchError
from megapack.hosts.patching.files import patch_set
from megapack.hosts.patching.target import Patch, Status

__all__ = ["Finding", "Status", "apply", "check", "original", "revert", "status"]

# Reentrant: replacing a name imports the replacement, and imports call hooks.
_LOCK = threading.RLock()
_ACTIVE: dict[str, list[Patch]] = {}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Whether one name of a host can be replaced."""

    target: str
    """Dotted path of the name; the host's name if its version is the problem."""
    problem: str
    """Why it cannot be replaced; empty if it can."""


def apply(*names: str) -> tuple[Status, ...]:
    """Replace the names of a framework: now, or right after its import.

        patching.apply("slime")

    Call it in every process: children do not inherit patches (see `startup`). A second call changes
    nothing.

    Args:
        names: frameworks that megapack has patches for, or paths of patch files (`.yaml`).
            A name after a minus is left out: `apply("slime", "-megatron_core")`.

    Returns:
        The state of each name.

    Raises:
        ConfigError: no such framework or file.
        PatchError: a name is not what was expected; nothing was replaced.
    """
    files = patch_set(names)
    with _LOCK:
        new = {
            file.host: [Patch(file, entry) for entry in file.patches]
            for file in files
            if file.host not in _ACTIVE
        }
        patches = [patch for own in new.values() for patch in own]
        _refuse_conflicts(patches)
        for patch in patches:
            patch.verify()
        _ACTIVE.update(new)
        for patch in patches:
            if patch.is_imported:
                patch.replace()
        for name in sorted({name for patch in patches for name in patch.module_chain}):
            if name not in sys.modules:
                _call_after_import(name)
        return tuple(patch.status() for file in files for patch in _ACTIVE[file.host])


def revert(*names: str) -> None:
    """Restore what `apply` replaced for the same names."""
    with _LOCK:
        for file in reversed(patch_set(names)):
            for patch in reversed(_ACTIVE.pop(file.host, [])):
                if patch.is_replaced:
                    patch.restore()


def status() -> tuple[Status, ...]:
    """The state of all patches that were applied in this process."""
    with _LOCK:
        return tuple(patch.status() for patch in _all_patches())


def original(name: str) -> Any:
    """The host's own object of a name that a patch has replaced, for replacements that call it.

    Args:
        name: the dotted path, as in `Status.target`.

    Raises:
        PatchError: the name is not replaced in this process.
    """
    with _LOCK:
        for patch in _all_patches():
            if patch.entry.dotted == name and patch.is_replaced:
                return patch.original
    raise PatchError(f"{name} is not replaced here; apply its patch first")


def check(*names: str) -> tuple[Finding, ...]:
    """Import a framework's modules and report which names can be replaced, without replacing any.

    A file for newer versions than the installed one is a finding of its own, and imports nothing.

    Args:
        names: as those of `apply`.

    Raises:
        ConfigError: no such host or file.
    """
    files = patch_set(names, any_version=True)
    wrong = [Finding(target=file.host, problem=file.problem) for file in files if file.problem]
    fitting = (Patch(file, entry) for file in files if not file.problem for entry in file.patches)
    return (*wrong, *map(_finding, fitting))


def _finding(patch: Patch) -> Finding:
    problem = ""
    try:
        importlib.import_module(patch.entry.module)
        # A name that is already replaced was verified before.
        if not any(other.is_replaced for other in _all_patches() if _same_target(patch, other)):
            patch.verify()
    except Exception as error:  # a host's import may raise anything
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Finding(target=patch.entry.dotted, problem=problem)


def _refuse_conflicts(patches: list[Patch]) -> None:
    for index, patch in enumerate(patches):
        for other in (*_all_patches(), *patches[:index]):
            if patch.file.host != other.file.host and _same_target(patch, other):
                raise PatchError(
                    f"{patch.entry.dotted} is already replaced by the patches for "
                    f"{other.file.host}; revert them before you apply {patch.file.host}"
                )


def _call_after_import(name: str) -> None:
    from wrapt import register_post_import_hook

    register_post_import_hook(_after_import, name)


def _after_import(module: ModuleType) -> None:
    """Verify and replace, after the import of a host's module or of a package that contains it."""
    with _LOCK:
        patches = [patch for patch in _all_patches() if module.__name__ in patch.module_chain]
        try:
            for patch in patches:
                patch.verify()
        except Exception:
            # The next import must fail with the error, too. While the module is in sys.modules,
            # wrapt takes it for imported and calls no hook.
            sys.modules.pop(module.__name__, None)
            _call_after_import(module.__name__)
            raise
        for patch in patches:
            if patch.entry.module == module.__name__:
                patch.replace()


def _all_patches() -> Iterator[Patch]:
    return (patch for patches in _ACTIVE.values() for patch in patches)


def _same_target(one: Patch, other: Patch) -> bool:
    return one.entry.target == other.entry.target
