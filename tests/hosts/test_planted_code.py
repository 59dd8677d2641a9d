"""Planted files and environment variables cannot make a process run code of their choice."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapack.doctor import runner
from megapack.errors import ConfigError
from megapack.hosts.patching.files import shipped_hosts
from megapack.hosts.startup import VARIABLE, asked_hosts

pytestmark = pytest.mark.hosts

TRAINING = "def get_forward_backward_func(pp_size=None, vp_size=None): return 'host'\n"
LOOK = "from megatron.training.training import get_forward_backward_func as f; print(f.__module__)"
OURS = "megapack.hosts.megatron_lm"
MARK = "open({mark!r}, 'a').write(__name__)\n"
EVIL = """\
host: slime
seen: never
patches:
  - target: evil:main
    signatures: ["()"]
    replacement: megapack.hosts.slime:build_dp_schedule
    why: it is planted
"""
ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives rights away")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment where megapack and Megatron-LM's training module are installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    training = folder / "lm" / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "__init__.py").write_text("")
    (training / "training.py").write_text(TRAINING)
    (site,) = folder.glob("lib/python3*/site-packages")
    # .pth files are read in the order of their names: this one before megapack-startup.pth.
    paths = [str(folder / "lm"), str(ROOT), sysconfig.get_path("purelib")]
    (site / "a.pth").write_text("\n".join(paths))
    shutil.copy(ROOT / "megapack-startup.pth", site)
    return folder / "bin" / "python"


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A working directory with planted files; running any of them writes the file `mark`."""
    mark = MARK.format(mark=str(tmp_path / "mark"))
    for name in (
        "__init__",
        "__main__",
        "errors",
        "hosts/__init__",
        "hosts/startup",
        "hosts/patching/__init__",
        "hosts/patching/files",
    ):
        path = tmp_path / "megapack" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(mark)
    (tmp_path / "evil.py").write_text(mark + "def main(): pass\n")
    for path in ("slime", "slime.yaml", "patches/slime.yaml", "megapack/patches/slime.yaml"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(EVIL)
    (tmp_path / "link.yaml").symlink_to(tmp_path / "slime.yaml")
    return tmp_path


def start(
    python: Path, cwd: Path, *args: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    names = (VARIABLE, "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k not in names} | environment
    return subprocess.run(
        [python, *args], check=False, capture_output=True, text=True, timeout=60, cwd=cwd, env=env
    )


def test_the_startup_file_runs_no_code_of_the_working_folder(python: Path, planted: Path) -> None:
    done = start(python, planted, "-c", LOOK, MEGAPACK_PATCH="megatron_lm,slime")
    assert (done.returncode, done.stdout) == (0, f"{OURS}\n"), done.stderr
    assert not (planted / "mark").exists()


@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_an_isolated_process_ignores_the_variables(python: Path, planted: Path, flag: str) -> None:
    environment = {"MEGAPACK_PATCH": "megatron_lm", "PYTHONPATH": str(planted)}
    done = start(python, planted.parent, flag, "-c", LOOK, **environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "megatron.training.training\n", "")
    assert not (planted / "mark").exists()


def test_the_children_of_an_isolated_doctor_are_isolated(
    python: Path, planted: Path, tmp_path: Path
) -> None:
    (planted / "sitecustomize.py").write_text(MARK.format(mark=str(tmp_path / "mark")))
    code = (
        "from megapack.doctor import runner\n"
        "runner.IN_CHILD = ('patches',)\n"
        "print(*(one.found or one.faults for one in runner.diagnose()))"
    )
    environment = {"MEGAPACK_PATCH": "./slime.yaml", "PYTHONPATH": str(planted)}
    done = start(python, planted.parent, "-I", "-c", code, **environment)
    assert done.stdout.endswith("MEGAPACK_PATCH is ignored (-E or -I)\n"), done
    assert not (planted / "mark").exists()


def test_a_name_means_the_installed_patches(python: Path, planted: Path) -> None:
    """-P keeps the folder off the path, as the `megapack` script does."""
    args = ("-P", "-m", "megapack", "patch", "show", "slime")
    here = start(python, planted, *args)
    elsewhere = start(python, ROOT.parent, *args)
    assert (here.returncode, here.stdout, here.stderr) == (0, elsewhere.stdout, "")
    assert "becomes megapack.hosts.slime.build_dp_schedule" in here.stdout
    assert "planted" not in here.stdout
    by_path = start(python, planted, *args[:-1], "link.yaml")
    assert "it is planted" in by_path.stdout
    assert not (planted / "mark").exists()


@pytest.mark.parametrize(
    "value",
    [
        *("slime.yaml", "./slime.yaml", "../slime.yaml", "link.yaml", "{cwd}/slime.yaml"),
        *("verl,slime.yaml", "patches/slime", "slime/../slime", "SLIME", "slime\0", "sl ime", "."),
    ],
)
def test_the_variable_cannot_name_files(planted: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"no patches for '.*here are .*slime"):
        asked_hosts(value.format(cwd=planted))


@pytest.mark.parametrize("value", ["slime.yaml", "{cwd}/link.yaml"])
def test_doctor_reads_no_file_named_by_the_variable(
    planted: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe imports the modules that patches replace; here that would be `evil`."""
    asked = value.format(cwd=planted)
    # Set after the child's start: the start-up file would end the child.
    late = f"import os; os.environ[{VARIABLE!r}] = {asked!r}; {runner._CHILD}"
    monkeypatch.setattr(runner, "_CHILD", late)
    monkeypatch.setattr(runner, "IN_CHILD", ("patches",))
    monkeypatch.chdir(planted)
    monkeypatch.syspath_prepend(str(ROOT))
    found = runner.diagnose()[-1]
    assert found.broken
    assert "no patches for" in found.faults[0]
    assert not (planted / "mark").exists()


FORK_EACH = """\
import importlib, json, os, sys
import megapack.hosts.patching, megapack.hosts.patching.files, wrapt
from megapack.hosts import startup
for value in map(os.fsdecode, map(bytes.fromhex, json.load(sys.stdin))):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 2)
        os.environ[startup.VARIABLE] = value
        startup.start()
        importlib.import_module("megatron.training")
        os._exit(0)
    os.close(write)
    said = os.fdopen(read).read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said]))
"""


def values(num_values: int) -> Iterator[bytes]:
    """Values of the variable: names, paths, and bytes that are not text."""
    rng = random.Random(0)
    pieces = [*shipped_hosts(), "", " ", ",", ", ,", "/", "..", ".yaml", "./slime.yaml", "%s{0}"]
    pieces += ["'", '"', "\\", "\n", "\r", "\t", "\x1b[2J", "é", "\u2028", "$(id)", "a" * 5000]
    for _ in range(num_values):
        text = "".join(rng.choices(pieces, k=rng.randrange(6)))
        yield text.encode() + rng.choice([b"", b"", b"", b"\xff", b"\xed\xa0\x80"])


def test_any_value_patches_or_ends_at_a_host_with_one_line(python: Path) -> None:
    tried = list(values(200))
    path = os.pathsep.join([str(ROOT), str(python.parents[1] / "lm")])
    done = subprocess.run(
        [sys.executable, "-c", FORK_EACH],
        input=json.dumps([value.hex() for value in tried]),
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": path},
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(tried)
    for value, (code, said) in zip(tried, answers, strict=True):
        names = [name.strip() for name in os.fsdecode(value).split(",") if name.strip()]
        right = set(names) <= set(shipped_hosts()) and bool(names or not value)
        assert code == (0 if right else 2), (value, said)
        assert len(said.splitlines()) == (0 if right else 1), (value, said)
        refusals = (
            f"megapack: {VARIABLE}: no patches for ",
            f"megapack: {VARIABLE}: {os.fsdecode(value)!r} names",
        )
        assert right or said.startswith(refusals), (value, said)
    assert 20 < sum(code == 0 for code, _ in answers) < 180


@pytest.mark.parametrize("where", [">/dev/full", ">&-"])
def test_an_error_that_cannot_be_printed_ends_the_process(python: Path, where: str) -> None:
    """Otherwise the process would run unpatched."""
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "import megatron.training; print(1)" 2{where}', python],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={VARIABLE: "slim"},
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_without_the_variable_a_start_imports_nothing() -> None:
    """Nothing beyond the modules that every Python imports at its start."""
    line = (ROOT / "megapack-startup.pth").read_text()
    code = (
        f"import sys; before = set(sys.modules); exec({line!r}); print(set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60, env={}
    )
    assert done.stdout == "set()\n"


@as_root
@pytest.mark.parametrize("kind", ["setresuid", "setresgid"])
def test_a_process_with_raised_rights_ignores_the_variable(
    python: Path, tmp_path: Path, kind: str
) -> None:
    code = (
        f"import os, sys; os.environ[{VARIABLE!r}] = 'megatron_lm'\n"
        f"os.{kind}({NOBODY}, 0, 0)\n"
        "from megapack.hosts import startup\n"
        f"startup.start(); print('megapack.hosts.patching' in sys.modules); {LOOK}"
    )
    done = start(python, tmp_path, "-c", code)
    assert (done.returncode, done.stdout) == (0, "False\nmegatron.training.training\n"), done.stderr


@as_root
@pytest.mark.parametrize("setuid", [True, False])
def test_a_setuid_python_is_recognized(setuid: bool) -> None:
    """A setuid copy of this Python, owned by root and started by nobody; and a plain copy."""
    code = (
        "import sys, types\n"
        "megapack = sys.modules['megapack'] = types.ModuleType('megapack')\n"
        "megapack.__path__ = [sys.argv[1]]\n"
        "from megapack.hosts import startup\n"
        "print(startup._has_more_rights())"
    )
    # The user nobody cannot enter tmp_path.
    with tempfile.TemporaryDirectory() as name:
        folder, binary = Path(name), Path(name, "python")
        folder.chmod(0o755)
        shutil.copy(Path(sys.executable).resolve(), binary)
        (folder / "hosts").mkdir(mode=0o755)
        shutil.copy(ROOT / "megapack" / "hosts" / "startup.py", folder / "hosts")
        binary.chmod(0o4755 if setuid else 0o755)
        done = subprocess.run(
            [binary, "-S", "-c", code, folder],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            user=NOBODY if setuid else None,
            env={"PYTHONHOME": sys.base_prefix},
        )
    assert done.stdout == f"{setuid}\n"
