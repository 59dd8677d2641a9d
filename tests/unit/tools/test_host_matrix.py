"""The matrix of hosts reads signatures as `inspect` shows them, and tells what moved."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sysconfig
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from megapack.hosts.patching.files import PatchFile, Replacement, shipped_files
from tools import host_matrix
from tools.host_matrix import Source, main, rows_of
from tools.hosting.read_signature import signatures
from tools.hosting.read_source import NotRead, Sources
from tools.hosting.sources import NoSource
from tools.pages import measured
from tools.pages.measured import Head

pytestmark = pytest.mark.unit

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file below the folder of a source tree."""

    def written(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))

    return written


def read(tmp_path: Path, name: str, module: str = "lib.a") -> list[str]:
    return [str(found) for found in signatures(Sources([tmp_path]), module, name)]


SHAPES = {
    "def f(a, /, b=1, *c, d, e=None, **g): pass": "(a, /, b=1, *c, d, e=None, **g)",
    "async def f(a: int = -1) -> str: pass": "(a=-1)",
    "@cached\n@other(3)\ndef f(a): pass": "(a)",
    "SIZE = 8\ndef f(a=SIZE, b=other.SIZE): pass": "(a=8, b=other.SIZE)",
    "def g(a): pass\nf = g": "(a)",
    "def f(a): pass\ndef f(b): pass": "(b)",
    "try:\n    from lib.c import f\nexcept ImportError:\n    f = None": "(in_c)",
    "try:\n    from absent import f\nexcept ImportError:\n    def f(a): pass": "(a)",
    "import sys\nif sys.platform == 'x':\n    def f(a): pass\nelse:\n    def f(a): pass": "(a)",
    "if TYPE_CHECKING:\n    from lib.c import f\ndef f(a): pass": "(a)",
    "from .c import *": "(in_c)",
    "from . import f": "(in_c)",
    "from lib.c import g as f": "(in_c)",
    "class f:\n    def __init__(self, a, *, b=2): pass": "(a, *, b=2)",
    "class f:\n    def __new__(cls, a): pass": "(a)",
    "class f: pass": "()",
    "from .c import Base\nclass f(Base, Generic[T]): pass": "(in_base)",
    "@dataclass\nclass f:\n    a: int\n    b: int = 2\n    c: ClassVar[int] = 3": "(a, b=2)",
    "@dataclass(kw_only=True)\nclass f:\n    a: int = field(default=1)": "(*, a=1)",
    "from .c import Fields\n@dataclass\nclass f(Fields):\n"
    "    b: list = field(default_factory=list)\n    c: int = field(init=False)": "(a, b=<factory>)",
}


@pytest.mark.parametrize("source", SHAPES)
def test_a_signature_is_read_from_its_source(source: str, write: Write, tmp_path: Path) -> None:
    write("lib/__init__.py", "from .c import f")
    write(
        "lib/c.py",
        """
        def g(in_c): pass
        f = g
        class Base:
            def __init__(self, in_base): pass
        @dataclass
        class Fields:
            a: int
        """,
    )
    write("lib/a.py", source)
    assert set(read(tmp_path, "f")) == {SHAPES[source]}


UNREAD = {
    "f = functools.partial(g, 1)": "whose signature is not in the source",
    "f = 7": "an object of type int",
    "from absent import f": "an import from absent, which is not here",
    "from lib.a import f": "more than 20 re-exports",
    "class f(nn.Module): pass": "a constructor of nn.Module, which is not here",
    "def g(a): pass": "no such name",
    "def f(:": "a.py, line 1: invalid syntax",
}


@pytest.mark.parametrize("source", UNREAD)
def test_what_the_source_does_not_tell_is_said(source: str, write: Write, tmp_path: Path) -> None:
    write("lib/a.py", source)
    with pytest.raises(NotRead, match=UNREAD[source]):
        read(tmp_path, "f")


def patch_file(
    *targets: str, signature: str = "(lengths, *, budget=None)", **more: str
) -> PatchFile:
    entries = tuple(
        Replacement(
            target=target,
            signatures=(signature,),
            replacement="megapack.hosts.slime:build_dp_schedule",
            why="a test",
        )
        for target in targets
    )
    return PatchFile(host="lib", seen="now", patches=entries, **more)  # type: ignore[arg-type]


def verdicts(tmp_path: Path, file: PatchFile, version: str | None = None) -> list[str]:
    source = Source(label="lib", folders=(tmp_path,), version=version)
    return [f"{row.moved}: {row.verdict}" for row in rows_of(source, [file])]


def test_what_moved_is_told_in_one_line(write: Write, tmp_path: Path) -> None:
    write("lib/__init__.py", "")
    write("lib/a.py", "def pack(lengths, *, budget=None): pass\ndef cut(lengths, budget): pass")
    write("lib/new/b.py", "def gone(lengths, *, budget=None): pass")
    file = patch_file("lib.a:pack", "lib.a:cut", "lib.a:gone", "lib.old:gone", "other.a:pack")
    expected = "expected (lengths, *, budget=None), found"
    assert verdicts(tmp_path, file) == [
        "False: fits",
        f"True: {expected} (lengths, budget)",
        f"True: {expected} no such name; gone is in lib.new.b",
        f"True: {expected} no module lib.old; gone is in lib.new.b",
    ]


def test_a_file_for_two_packages_is_told_of_each(write: Write, tmp_path: Path) -> None:
    """What one imports from the other is read in the other's tree; a class of a branch only has
    not moved."""
    write("lib/lib/a.py", "from other.b import pack")
    write("other/other/b.py", "def pack(lengths, *, budget=None): pass\nclass Mine: pass")
    patches = patch_file("lib.a:pack", "other.b:pack", "other.b:DefaultDynamicCPScheduler.plan")
    sources = [
        Source(label=name, folders=(tmp_path / name,), version="1.0") for name in ("lib", "other")
    ]
    beside = [tmp_path / "lib", tmp_path / "other"]
    rows = [row for source in sources for row in rows_of(source, [patches], beside)]
    dev = "Megatron-Core has it on its dev branch only"
    assert [(row.source, row.verdict, row.moved) for row in rows] == [
        ("lib", "fits", False),
        ("other", "fits", False),
        ("other", dev, False),
    ]
    assert host_matrix.as_markdown(rows).splitlines()[2:] == [
        "| `lib` | fits | source lib 1.0 |",
        "| `lib` | 1 of 2 fit; `other.b.DefaultDynamicCPScheduler.plan`: "
        f"{dev} | source other 1.0 |",
    ]


def test_the_command_says_what_moved(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("slime/slime/utils/dp_schedule.py", "def build_dp_schedule(args): pass")
    assert main(["--trees", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "slime.utils.dp_schedule.build_dp_schedule: expected (args," in printed.out
    assert re.match(r"\d+ names, [1-9]\d* moved; no source of .*verl", printed.err)
    (tmp_path / "empty").mkdir()
    assert main(["--trees", str(tmp_path / "empty")]) == 2


def test_the_table_is_written_as_a_measured_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("trees/slime/slime/utils/dp_schedule.py", "def build_dp_schedule(args): pass")
    monkeypatch.setattr(measured, "MEASURED", tmp_path)
    assert main(["--trees", str(tmp_path / "trees"), "--write"]) == 1
    path = tmp_path / "hosts_signatures.md"
    assert Head.read(path).title == "Do the patches fit the hosts' code?"
    assert "\n| host | result | of |\n|---|---|---|\n| `slime` |" in path.read_text()


def test_wrong_input_and_an_index_out_of_reach_are_not_taken_for_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--trees", str(tmp_path / "absent")])
    assert ended.value.code == 2
    assert "absent is not a folder of source trees" in capsys.readouterr().err

    def unreachable(*args: object, **kwargs: object) -> Path:
        raise NoSource("verl==0.9.1 cannot be installed: no index")

    monkeypatch.setattr(host_matrix, "installed", unreachable)
    assert main(["--releases"]) == 2
    assert capsys.readouterr().err == "verl==0.9.1 cannot be installed: no index\n"


def test_the_patches_fit_the_installed_megatron_core() -> None:
    """All that is here without the package index: it is read, never imported."""
    site = Path(sysconfig.get_path("purelib"))
    version = importlib.metadata.version("megatron-core")
    source = Source(label="installed", folders=(site,), version=version)
    rows = rows_of(source, shipped_files())
    assert any(row.target.startswith("megatron.core.") for row in rows)
    assert not [row for row in rows if row.moved]
