"""Runs Transformer Engine's Python where its compiled part is absent and there is no CUDA device.

`pip install transformer-engine` without an extra brings Python files alone, whose import raises an
error, also within `import megatron.core`. `import megapack` registers a finder, with which they
import and run on stand-ins of the compiled part (`megapack.cpu.te`). On a machine with CUDA, or
with the compiled part, the finder steps aside: a Transformer Engine that is installed badly there
still says so itself.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

PACKAGE = "transformer_engine"
COMPILED = "transformer_engine_torch"
# Distributions with the compiled part, and libraries of a build from source.
_COMPILED_PACKAGES = ("transformer-engine-cu12", "transformer-engine-cu13")
_LIBRARIES = ("libtransformer_engine.so", f"{COMPILED}*.so")


class TEFinder:
    """A finder of `sys.meta_path` for Transformer Engine's modules, and for no others."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module on stand-ins; None leaves it to the other finders."""
        if name.partition(".")[0] not in (PACKAGE, COMPILED) or python_alone() is None:
            return None
        # Only now, and by name: it needs torch, which planning does without, and knows nothing of
        # this module, which is below all rooms.
        loader = importlib.import_module("megapack.cpu.te.loader")
        spec: importlib.machinery.ModuleSpec | None = loader.find_spec(name, path)
        return spec


def register() -> None:
    """Put the finder before Python's own. Idempotent, and nothing without Transformer Engine."""
    if TEFinder not in sys.meta_path and installed_at() is not None:
        sys.meta_path.insert(0, TEFinder)


def python_alone() -> Path | None:
    """The folder of Transformer Engine's Python, if stand-ins serve it on this machine."""
    folder = installed_at()
    if folder is None or not _is_release_without_compiled_part(folder):
        return None
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return None if torch.cuda.is_available() else folder


def installed_at() -> Path | None:
    """The folder of the package `transformer_engine`."""
    spec = importlib.machinery.PathFinder.find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


# The imports of one Transformer Engine ask about a hundred times.
@functools.cache
def _is_release_without_compiled_part(folder: Path) -> bool:
    # What has no metadata is no release, such as a folder of that name in the working directory.
    if not _is_installed(PACKAGE) or any(map(_is_installed, _COMPILED_PACKAGES)):
        return False
    places = (folder, folder / "wheel_lib", folder.parent)
    return not any(next(place.glob(name), None) for place in places for name in _LIBRARIES)


def _is_installed(distribution: str) -> bool:
    return any(importlib.metadata.distributions(name=distribution))
