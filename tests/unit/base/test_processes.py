"""Child processes run nothing of the working directory, and ignore what their parent ignores."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megapack.base.processes import python_command

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
# Modules that children import before or after they have the parent's path.
PLANTED = ("pickle", "json", "os", "numpy", "encodings/utf_8", "sitecustomize", "megapack/__init__")
FEW_PROBES = (
    "from megapack.doctor import runner; runner.IN_CHILD = ('patches',); "
    "print(runner.diagnose()[-1])"
)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A working directory with modules that write the file `mark` when they are imported."""
    folder = tmp_path / "cwd"
    for name in PLANTED:
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write(__name__)\n")
    return folder


def run(cwd: Path, *args: str, **env: str) -> str:
    """The output of a Python that, as the `megapack` script does, leaves out the directory."""
    done = subprocess.run(
        [sys.executable, "-P", *args],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_with_children_run_nothing_of_the_working_directory(
    planted: Path, tmp_path: Path
) -> None:
    # Eight blocks of 1 MiB are read by several processes.
    line = json.dumps({"prompt": "a", "response": "b", "unread": "c" * 100_000}) + "\n"
    (tmp_path / "data.jsonl").write_text(line * 100)
    (tmp_path / "a.yaml").write_text("name: a\nplan: {max_tokens_per_gpu: 64}\n")
    options = ["--config", "../a.yaml", "data.workers=2"]
    shown = run(planted, "-m", "megapack", "data", "show", "../data.jsonl", *options)
    assert shown.startswith("100 samples, ")
    assert "patches" in run(planted, "-c", FEW_PROBES)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("flags", ["-I", "-E", "-s", "-S"])
def test_a_child_has_the_path_and_the_flags_of_its_parent(planted: Path, flags: str) -> None:
    ask = "import sys; print(sys.path, sys.flags.isolated, sys.flags.ignore_environment, "
    ask += "sys.flags.no_user_site, sys.flags.no_site, sys.flags.safe_path)"
    code = (
        f"import subprocess, sys; sys.path.append({str(ROOT)!r}); {ask}; sys.stdout.flush()\n"
        f"from megapack.base.processes import python_command\n"
        f"subprocess.run(python_command({ask!r}), check=True)"
    )
    parent, child = run(planted, flags, "-c", code, PYTHONPATH=str(planted.parent)).splitlines()
    assert parent == child
    assert str(planted) not in child


def test_every_child_of_the_package_is_started_so() -> None:
    """The shell, `os.system` and the like are not used at all."""
    starts = {"Popen", "run", "call", "check_call", "check_output"}
    others = {"os.system", "os.popen", "os.fork", "multiprocessing", "os.spawnv", "os.execv"}
    found = []
    for path in sorted((ROOT / "megapack").rglob("*.py")):
        text = path.read_text()
        assert not any(f"{name}(" in text or f"import {name}" in text for name in others), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = ast.unparse(node.func.value)
                if of == "subprocess" and node.func.attr in starts:
                    found.append(ast.unparse(node.args[0]).partition("(")[0])
                    assert not any(keyword.arg == "shell" for keyword in node.keywords), path
    assert found
    assert set(found) == {"python_command"}


def test_arguments_and_odd_paths_reach_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = "/a 'b'\"\\\udcff"
    monkeypatch.setattr(sys, "path", [*sys.path, "", odd])
    code = "print(ascii(sys.path[-2:]), sys.argv[1:])"
    done = subprocess.run(
        python_command(code, "x y"), check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{[str(Path.cwd()), odd]!a} ['x y']\n"
