"""A small framework with patches, for tests that run in this process."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

from megapack.hosts import patching

PACK = "def pack(lengths, *, budget=None): return 'host'\n"
ENTRY = """\
  - target: {target}
    signatures: ["{signature}"]
    replacement: megapack.hosts.stub:{replacement}
    why: a test
    rebinds: {rebinds}
"""


def pack(lengths: object, *, budget: object = None) -> str:
    """The replacement of the host's function."""
    return "megapack"


def pack_steps(*args: object, **kwargs: object) -> str:
    """The replacement of a second patch; its signature is not the host's."""
    return "steps"


def pack_method(self: object, lengths: object) -> str:
    """The replacement of a method."""
    return "megapack"


for replacement in (pack, pack_steps, pack_method):
    replacement.__module__ = "megapack.hosts.stub"


class Host:
    """The package `stubhost` in a temporary folder, and its patch file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patches = str(folder / "stubhost.yaml")
        monkeypatch.syspath_prepend(str(folder))
        ours = types.ModuleType("megapack.hosts.stub")
        ours.pack = pack  # type: ignore[attr-defined]
        ours.pack_steps = pack_steps  # type: ignore[attr-defined]
        ours.pack_method = pack_method  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "megapack.hosts.stub", ours)
        self.write("stubhost/__init__.py", "")
        self.write("stubhost/utils/__init__.py", "")
        self.write("stubhost/utils/packing.py", PACK)
        self.write("stubhost/trainer.py", "from stubhost.utils.packing import pack\n")
        self.write("stubscript.py", "from stubhost.utils.packing import pack\n")
        self.patch("stubhost.utils.packing:pack")

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        importlib.invalidate_caches()

    def patch(
        self,
        *targets: str,
        signature: str = "(lengths, *, budget=None)",
        replacement: str = "pack",
        host: str = "stubhost",
        rebinds: str = "host",
    ) -> str:
        """Write a patch file for these targets; returns its path."""
        entries = [
            ENTRY.format(
                target=target, signature=signature, replacement=replacement, rebinds=rebinds
            )
            for target in targets
        ]
        path = self.folder / f"{host}.yaml"
        path.write_text(f"host: {host}\nseen: now\npatches:\n{''.join(entries)}")
        return str(path)

    def load(self, module: str) -> types.ModuleType:
        return importlib.import_module(module)

    def remove(self) -> None:
        """Revert all patches and forget the stub modules."""
        for status in patching.status():
            path = self.folder / f"{status.host}.yaml"
            patching.revert(str(path) if path.exists() else status.host)
        for name in [name for name in sys.modules if name.startswith("stub")]:
            del sys.modules[name]
