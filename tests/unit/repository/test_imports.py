"""Imports follow the order of the data; read from the import statements of megapack/."""

from __future__ import annotations

import ast
import functools
import pydoc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.code_lines import room_of
from tools.make_architecture import PICTURE, import_order, picture, wing_of

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megapack"

# A room (a folder or a module of megapack/, or of megapack/job) imports only rooms on lower floors.
# The floors are in docs/architecture.md, and so are the wings.
FLOORS = import_order()
WING = wing_of()
# What a room of a wing may import, beside its own wing.
STANDS_ON = {"core": "", "hosts": "core", "job": "core", "commands": "core hosts job"}
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}

# Rooms that plan; they do not import torch.
WITHOUT_TORCH = [
    "errors",
    "moved",
    "layout",
    "base",
    "policy",
    "prefixes",
    "cost",
    "plan",
    "config",
    "pipeline",
    "planner",
    "dp_schedule",
    "outlook",
    "hosts.startup",
    "hosts.patching",
    "job.config",
    "job.data",
    "job.dry_run",
    "job.view",
    "commands",
    "cli",
]

# Rooms and single modules that may import Megatron.
MEGATRON = [
    "model",
    "schedule",
    "cpu",
    "job.gpt",
    "job.checkpoint.blocks",
    "job.checkpoint.checkpoints",
    "job.checkpoint.state",
    "job.checkpoint.writer",
    "job.hf.blocks",
    "job.train",
    "doctor.probes",
    "hosts.megatron_bridge",
    "hosts.megatron_core",
    "hosts.megatron_lm",
    "hosts.nemo_rl",
    "hosts.roll",
    "hosts.shared.chunks",
]

# Modules that read or write what transformers reads, with it, or build its towers. In rooms without
# torch they import both inside of functions.
TRANSFORMERS = [
    *("job.data.hf_tokenizer", "job.data.images", "job.data.toy"),
    *("job.gpt.vision", "model.vision.tower"),
]

# Only hosts/ imports other frameworks. Megatron-LM's training scripts count as one.
FRAMEWORKS = (
    "accelerate deepspeed lightning miles nemo nemo_rl openrlhf ray sglang skyrl skyrl_train slime "
    "torchtitan transformers trl verl vllm megatron.training megatron.rl megatron.bridge"
)


@dataclass(frozen=True)
class Import:
    """One imported name: `from megapack.plan import Plan` is `megapack.plan.Plan`."""

    name: str
    line: int
    top: bool
    """Whether it runs at import time, not inside a function or under TYPE_CHECKING."""

    def of(self, package: str) -> bool:
        return self.name == package or self.name.startswith(package + ".")


@functools.cache
def modules() -> dict[str, Path]:
    """Files of all modules by dotted name below megapack, such as `plan.check`."""
    files = PACKAGE.rglob("*.py")
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in files}


def rooms() -> set[str]:
    """Folders and modules directly in megapack/ and megapack/job, without `__init__`."""
    return {room for room in map(room_of, modules()) if not room.endswith("__")}


def is_within(module: str, names: list[str]) -> bool:
    """Whether a module is one of these modules, or in one of these rooms."""
    return any(f"{module}.".startswith(f"{name}.") for name in names)


@functools.cache
def imports(path: Path) -> list[Import]:
    return list(_imports(ast.parse(path.read_text(), str(path)).body, top=True))


def _imports(body: list[ast.stmt], top: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", node.lineno, top)
        else:
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                inner = getattr(node, field, [])
                inner_top = top and not function and not (typing_only and field == "body")
                yield from _imports(inner if isinstance(inner, list) else [], inner_top)


def imported_module(imported: Import, known: dict[str, Path]) -> str | None:
    """The module that an import loads: `plan.check` for megapack.plan.check.check_plan."""
    if not imported.of("megapack"):
        return None
    parts = imported.name.split(".")[1:]
    for end in range(len(parts), 0, -1):
        for name in (".".join(parts[:end]), ".".join([*parts[:end], "__init__"])):
            if name in known:
                return name
    return "__init__"


def complaints(module: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    room = room_of(module)
    for found in imports(path):
        where = f"{module}:{found.line} imports {found.name}"
        own = imported_module(found, known)
        other = room_of(own) if own else room
        known_rooms = room in FLOOR and other in FLOOR and other != room
        if known_rooms and found.top and FLOOR[other] >= FLOOR[room]:
            yield f"{where}: {other} is not on a floor below {room}"
        if known_rooms and WING[other] not in (WING[room], *STANDS_ON[WING[room]].split()):
            yield f"{where}: {WING[room]} must not know {WING[other]}"
        is_reader = not found.top and is_within(module, TRANSFORMERS)
        if room in WITHOUT_TORCH and (found.of("torch") or found.of("megatron")) and not is_reader:
            yield f"{where}: {room} must not need torch"
        if found.of("megatron") and not is_within(module, MEGATRON):
            yield f"{where}: {module} is not listed as importing Megatron"
        foreign = any(found.of(framework) for framework in FRAMEWORKS.split())
        if foreign and room != "hosts" and not (is_reader and found.of("transformers")):
            yield f"{where}: only hosts/ imports other frameworks"


def test_the_order_lists_every_room_once() -> None:
    assert sorted(room for floor in FLOORS for room in floor) == sorted(rooms())


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    drawn = PICTURE.read_text(encoding="utf-8")
    assert drawn == picture(), "run tools/make_architecture.py"


@pytest.mark.parametrize("module", sorted(set(modules()) - {"__init__", "__main__"}))
def test_imports_of_a_module(module: str) -> None:
    known = modules()
    assert list(complaints(module, known[module], known)) == []


@pytest.mark.parametrize("name", MEGATRON)
def test_listed_modules_import_megatron(name: str) -> None:
    """A stale name in the list would let a new import pass unnoticed."""
    paths = [path for module, path in modules().items() if is_within(module, [name])]
    assert any(found.of("megatron") for path in paths for found in imports(path))


@pytest.mark.parametrize(
    "init",
    sorted(
        name
        for name in modules()
        if name.endswith(".__init__")
        and not re.fullmatch(r"hosts\.(?!shared|patching)\w+\.__init__", name)
    ),
)
def test_room_inits_only_re_export(init: str) -> None:
    """Only a docstring and explicit re-exports of own modules; other code could hide a cycle.

    The folder of one host is its module, whose functions patches name, with parts below it.
    """
    path = modules()[init]
    docstring, *rest = ast.parse(path.read_text()).body
    assert isinstance(docstring, ast.Expr)
    own = "megapack." + init.removesuffix(".__init__")
    names = []
    exported: object = []
    for node in rest:
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").startswith(f"{own}."), ast.unparse(node)
            names += [alias.name for alias in node.names if alias.asname is None]
        else:
            assert isinstance(node, ast.Assign), ast.unparse(node)
            assert ast.unparse(node.targets[0]) == "__all__", ast.unparse(node)
            exported = ast.literal_eval(node.value)
    assert sorted(exported) == sorted(names)  # type: ignore[call-overload]


# Files above 500 lines: tables of Megatron's fields, and the state of a run.
LONG = {"job.gpt.build", "job.train.job"}


def test_no_folder_is_crowded() -> None:
    """At most 12 modules at the top, 25 files in a room, 500 lines in a file but for tables."""
    counts = Counter(path.parent for path in modules().values() if path.stem != "__init__")
    assert counts.pop(PACKAGE) <= 12
    assert {str(folder): count for folder, count in counts.items() if count > 25} == {}
    long = {name for name, path in modules().items() if len(path.read_text().splitlines()) > 500}
    assert long <= LONG, f"divide {sorted(long - LONG)}"
    assert long == LONG, f"take {sorted(LONG - long)} out of LONG"


def test_test_files_have_unique_names() -> None:
    """pytest imports test files by name, without their folders."""
    names = Counter(path.name for path in ROOT.glob("tests/**/test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_imports_have_no_cycles() -> None:
    """Not even imports for types or inside functions, which Python would allow."""
    known = modules()
    edges = {
        module: {
            own
            for found in imports(path)
            if (own := imported_module(found, known)) not in (None, module)
        }
        for module, path in known.items()
    }
    assert sum(map(len, edges.values())) > 20
    while leaves := {module for module, to in edges.items() if not to & edges.keys()}:
        edges = {module: to for module, to in edges.items() if module not in leaves}
    assert edges == {}


def test_the_reader_sees_every_form_of_import(tmp_path: Path) -> None:
    path = tmp_path / "plan.py"
    path.write_text(
        "import torch.nn as nn\nfrom megapack import samples, Layout\n"
        "try:\n    import megatron\nexcept ImportError:\n    import slime\n"
        "if TYPE_CHECKING:\n    from megapack.job.train import Trainer\n"
        "class A:\n    import ray\n"
        "    def f(self):\n        with x:\n            import verl.trainer\n"
    )
    found = [(imported.name, imported.top) for imported in imports(path)]
    assert found == [
        ("torch.nn", True),
        ("megapack.samples", True),
        ("megapack.Layout", True),
        ("megatron", True),
        ("slime", True),
        ("megapack.job.train.Trainer", False),
        ("ray", True),
        ("verl.trainer", False),
    ]
    assert len(list(complaints("plan.plan", path, modules()))) == 8


def test_planning_does_not_import_torch() -> None:
    """One process imports the modules in turn, and names those after which torch is there."""
    code = """
import importlib, sys
for name in ("cli", "commands.train", "job.dry_run", "commands.tune"):
    importlib.import_module(f"megapack.{name}")
    print(*(f"{name}:{heavy}" for heavy in ("megatron", "torch") if heavy in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_planner_loads_no_sizes_of_a_model_and_no_fit() -> None:
    """It needs seconds of rows, whatever they come from; a model and a fit are asked for."""
    code = "import sys, megapack.dp_schedule; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "megapack.cost.model" in loaded
    others = {f"megapack.cost.{name}" for name in ("options", "sizes", "layers", "fit", "memory")}
    assert loaded & {"torch", *others} == set()


def test_the_adapter_loads_nothing_of_the_main_job() -> None:
    """A loop of one's own needs neither the job nor the GPT that it builds."""
    code = "import sys, megapack.schedule; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[1] for name in done.stdout.split() if name.startswith("megapack.")}
    assert "rows" in loaded
    assert loaded & {"job", "hosts", "commands"} == set()


@pytest.mark.parametrize("host", ["slime", "miles", "xtuner", "unirl"])
def test_planning_hosts_do_not_import_torch(host: str) -> None:
    """Neither they nor the modules that they import, at import time."""
    known = modules()
    seen = set()
    waiting = [next(m for m in (f"hosts.{host}", f"hosts.{host}.__init__") if m in known)]
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for found in imports(known[module]):
            heavy = found.of("torch") or found.of("megatron")
            assert not (found.top and heavy), f"{module}:{found.line}"
            own = imported_module(found, known)
            if found.top and own is not None and own not in seen:
                waiting.append(own)
    assert "dp_schedule" in seen or host == "unirl"


def test_imports_between_test_modules_resolve() -> None:
    """Tests that need a GPU or minutes rarely run, so a bad import there would go unnoticed."""
    trees = {path: ast.parse(path.read_text()) for path in ROOT.glob("tests/**/*.py")}
    missing = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
                source = trees.get(ROOT / f"{node.module.replace('.', '/')}.py")
                names = {alias.name for alias in node.names} - bound_names(source)
                missing += [f"{path.name}:{node.lineno} {name}" for name in names if source]
    assert missing == []


def bound_names(tree: ast.Module | None) -> set[str]:
    """Names that a module binds, at any indentation."""
    nodes = list(ast.walk(tree)) if tree else []
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef | ast.alias)}
    return defined | {n.id for n in nodes if isinstance(n, ast.Name)}


def test_every_name_in_the_architecture_tables_exists() -> None:
    """The numbered steps of docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    boxes = re.findall(r"^\| \d+ \| ([^|]+) \|", page, re.MULTILINE)
    names = [name for box in boxes for name in re.findall(r"`([a-z_.]+\w+)`", box)]
    assert len(names) > 20
    for name in names:
        assert pydoc.locate(f"megapack.{name}") is not None, name


def test_the_table_of_rooms_lists_every_folder() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[a-z_.`, ]+`) \| \w", page, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([a-z_.]+)`", row)}
    folders = {room for room in rooms() if (PACKAGE / room.replace(".", "/")).is_dir()}
    assert folders - {"hosts.startup"} <= listed
