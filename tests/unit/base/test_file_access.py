"""How the package's sources read and write files: no pickles, no partial files."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).resolve().parents[3] / "megapack"

# Modules and functions that read pickles, or YAML that names Python objects.
UNSAFE_MODULES = {"pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"}
SAFE_WITH = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
UNPICKLES = {
    "job.checkpoint.index": "reads torch's pickled index; allows only names of a list",
    "job.data.processes": "pipes between a process and the processes that it started itself",
}

# Files are written by `files.write_whole`. The exceptions, each with its reason.
WRITERS = {
    ("base.files", "open"): "write_whole itself",
    ("base.files", "os.open"): "write_whole itself, into a device or a pipe",
    ("base.files", "os.replace"): "write_whole itself",
    ("base.jit", "open"): "the lock's file, which stays empty",
    ("cli", "os.open"): "/dev/null in place of a closed standard output",
    ("job.train.folder", "open"): "appends lines (readers skip a partial last line), and a lock",
    ("job.train.folder", "self.write_text"): "write_whole in the run's folder",
    ("job.train.job", "folder.write_text"): "write_whole in the run's folder",
    ("job.train.first_lines", "run.folder.write_text"): "the same",
    ("base.array_file", "open"): "written in pieces; synced and renamed when complete",
    ("base.array_file", "os.replace"): "the same",
    ("job.data.index", "tempfile.TemporaryFile"): "checks that a folder is writable; has no name",
    ("job.data.images.reader", "Image.open"): "reads a header",
    ("job.data.images.reader", "_pillow().open"): "reads an image",
    ("job.data.processes", "os.fdopen"): "a pipe to the parent",
    ("job.data.processes", "pickle.dump"): "into that pipe, or into one to a process of its own",
    ("job.hf.folder", "self.open"): "reads safetensors",
    ("job.hf.load", "stored.open"): "reads safetensors",
    ("job.hf.unused", "stored.open"): "the same",
    ("job.hf.output", "write_text"): "in a folder that is renamed when all is on the disk",
    ("job.hf.output", "shutil.copyfile"): "the same",
    ("job.hf.shards", "open"): "the same",
    ("job.hf.shards", "write_text"): "the same",
    ("job.hf.adapters", "write_text"): "the same",
    ("job.hf.output", "os.rename"): "renames a complete folder, or one to be removed",
    ("job.checkpoint.checkpoints", "open"): "in a folder that is renamed when all is on the disk",
    ("job.checkpoint.checkpoints", "torch.save"): "the same",
    ("job.checkpoint.folders", "write_text"): "the same",
    ("job.checkpoint.folders", "os.rename"): "renames a complete folder, or one to be removed",
    ("job.checkpoint.writer", "torch.save"): "the same as job.checkpoint.checkpoints",
    ("job.view.plot", "figure.savefig"): "into memory",
    ("doctor.probes", "os.fdopen"): "a pipe to the parent",
}
WRITES = {"write_text", "write_bytes", "savefig", "tofile", "fdopen", "mkstemp", "copytree"}
WRITES |= {"TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile", "copyfile", "copy2"}
WRITES_OF = {
    "save": {"torch", "np", "numpy", "torch_checkpoint", "dist_checkpointing"},
    "savez": {"np", "numpy"},
    "dump": {"json", "pickle"},
    "replace": {"os"},
    "rename": {"os"},
    "move": {"shutil"},
}


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    return [
        (".".join(path.relative_to(PACKAGE).with_suffix("").parts), ast.parse(path.read_text()))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the dotted name of its function; "" for other expressions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            dotted = isinstance(node.func, ast.Attribute | ast.Name)
            yield ast.unparse(node.func) if dotted else "", node


def imported(tree: ast.Module) -> set[str]:
    """Top-level names of all imports."""
    nodes = list(ast.walk(tree))
    plain = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return {name.partition(".")[0] for name in plain} | {
        (n.module or "").partition(".")[0] for n in nodes if isinstance(n, ast.ImportFrom)
    }


def unsafe(tree: ast.Module) -> list[str]:
    found = []
    for name, node in calls(tree):
        given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        key, value = SAFE_WITH.get(name, (None, None))
        if name in UNSAFE_CALLS or (key is not None and given.get(key) is not value):
            found.append(f"line {node.lineno}: {name}")
    return found


def writes(name: str, node: ast.Call) -> bool:
    receiver, _, attribute = name.rpartition(".")
    if name == "os.open":
        return ast.unparse(node.args[1]) != "os.O_RDONLY"
    if attribute == "open":
        # `open(path)` reads; a mode that is not a constant counts as writing.
        at = 1 if receiver in ("", "io") else 0
        given = [k.value for k in node.keywords if k.arg == "mode"] + node.args[at : at + 1]
        mode = getattr(given[0], "value", "w") if given else "r"
        return not isinstance(mode, str) or bool(set(mode) & set("wax+"))
    return attribute in WRITES or receiver in WRITES_OF.get(attribute, ())


def short(name: str) -> str:
    """The method's name if the receiver is an expression: `write_text` of `(part / NAME)`."""
    return name.rpartition(".")[2] if name.startswith("(") else name


def test_nothing_is_unpickled() -> None:
    assert {name for name, tree in modules() if imported(tree) & UNSAFE_MODULES} == set(UNPICKLES)
    assert {name: found for name, tree in modules() if (found := unsafe(tree))} == {}


def test_files_are_written_atomically_except_listed_ones() -> None:
    found = {
        (module, short(name))
        for module, tree in modules()
        for name, node in calls(tree)
        if writes(name, node)
    }
    assert found == set(WRITERS)


@pytest.mark.parametrize(
    "code",
    [
        *("torch.load(p)", "torch.load(p, weights_only=False)", "np.load(p)", "yaml.load(t)"),
        "np.load(p, allow_pickle=flag)",
    ],
)
def test_unsafe_reads_are_recognised(code: str) -> None:
    assert unsafe(ast.parse(code))


@pytest.mark.parametrize(
    ("code", "is_write"),
    [
        ("open(p)", False),
        ("open(p, 'rb')", False),
        ("open(p, 'w')", True),
        ("open(p, mode='ab')", True),
        ("open(p, mode)", True),
        ("path.open('x')", True),
        ("path.open()", False),
        ("path.write_bytes(b'')", True),
        ("text.replace('a', 'b')", False),
        ("os.replace(a, b)", True),
        ("os.open(p, os.O_RDONLY)", False),
        ("os.open(p, flags)", True),
        ("torch.save(a, b)", True),
        ("self.save(a)", False),
    ],
)
def test_writes_are_recognised(code: str, is_write: bool) -> None:
    ((name, node),) = calls(ast.parse(code))
    assert writes(name, node) is is_write
