"""Does a Megatron-Core still have the names that megapack uses?

    tools/megatron_names.py FOLDER     # sources of Megatron-LM, of a fork, or an unpacked wheel

Compares all imports of `megatron.core` in megapack, attributes of the modules among them, and the
arguments of methods that megapack overrides. Nothing is imported: both sides are read from their
source. Prints a line per name that moved. Exit code: 0 if none has, 1 if some have, 2 for a wrong
folder. What a name does is for the tests: `tools/test_versions.sh --megatron FOLDER`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.hosting.read_source import NotRead, Outside, Sources  # noqa: E402

PACKAGE = "megatron.core"
# Old versions lack these; megapack asks for them before it uses them, or sets them itself.
ASKED_FOR = {
    "megatron.core.transformer.moe.moe_utils.te_general_gemm",
    "megatron.core.transformer.transformer_layer.HyperConnectionTransformerLayer",
}
# Modules that are there since these versions; megapack refuses what needs them before.
SINCE = {
    "megatron.core.models.hybrid": "0.18",
    "megatron.core.optimizer.emerging_optimizers": "0.18",
}


class Uses:
    """What one module of megapack takes from Megatron-Core.

    Attributes:
        names: local name -> (module, name in it).
    """

    def __init__(self, path: Path, sources: Sources) -> None:
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self._sources = sources
        self.names: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                for alias in node.names:
                    self.names[alias.asname or alias.name] = (node.module or "", alias.name)

    def moved(self) -> Iterator[str]:
        """A text per name that is not there any more."""
        for module, name in self.names.values():
            yield from self._absent(module, name)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = ".".join(self.names.get(node.value.id, ()))
                if module and self._sources.has(module):
                    yield from self._absent(module, node.attr)
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id in self.names:
                        yield from self._overridden(node, *self.names[base.id])

    def _absent(self, module: str, name: str) -> Iterator[str]:
        dotted = f"{module}.{name}"
        if dotted in ASKED_FOR or self._sources.has(dotted):
            return
        if any(dotted.startswith(own) and not self._sources.has(own) for own in SINCE):
            return
        if not self._sources.has(module):
            yield f"there is no module {module}, which had {name}"
            return
        try:
            self._sources.bindings(module, name)
        except Outside:
            return
        except NotRead:
            others = self._sources.modules_with(PACKAGE, name)
            also = f"; it is in {', '.join(others[:3])}" if others else ""
            yield f"{module} has no {name}{also}"

    def _overridden(self, own: ast.ClassDef, module: str, name: str) -> Iterator[str]:
        """Methods of Megatron's class that take an argument which megapack's do not."""
        try:
            bindings = self._sources.bindings(module, name)
        except NotRead:
            return
        theirs = {n: args for found in bindings for n, args in _methods(found.node).items()}
        for method, args in _methods(own).items():
            if method in theirs and not args.kwarg and method != "__init__":
                taken = _parameters(args)
                new = [arg for arg in _parameters(theirs[method]) if arg not in taken]
                if new:
                    yield f"{module}.{name}.{method} takes {', '.join(new)}; {own.name}'s does not"


def _methods(node: ast.stmt) -> dict[str, ast.arguments]:
    if not isinstance(node, ast.ClassDef):
        return {}
    return {f.name: f.args for f in node.body if isinstance(f, ast.FunctionDef)}


def _parameters(args: ast.arguments) -> list[str]:
    return [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def moved_names(folder: Path) -> list[str]:
    """A line per use of Megatron-Core in megapack that the sources in a folder do not have."""
    sources = Sources([folder])
    lines = []
    for path in sorted((ROOT / "megapack").rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        lines += [f"{where}: {text}" for text in Uses(path, sources).moved()]
    return list(dict.fromkeys(lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Print what moved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args(argv).folder
    if not (folder / "megatron" / "core" / "package_info.py").is_file():
        parser.error(f"{folder} has no megatron/core")
    lines = moved_names(folder)
    for line in lines:
        print(line)
    print(f"{len(lines)} names moved", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
