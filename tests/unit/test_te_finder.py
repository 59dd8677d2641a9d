"""Transformer Engine's Python without its compiled part: when stand-ins serve it, when not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megapack import te_finder

pytestmark = pytest.mark.unit

ROOT = Path(te_finder.__file__).parents[1]


def installed(folder: Path, files: dict[str, str]) -> Path:
    """A folder for `sys.path` with a Transformer Engine 2.11.0 of these files."""
    python = {"__init__.py": "", "common/__init__.py": ""}
    for name, text in {**python, **files}.items():
        path = folder / "transformer_engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    distribution(folder, "transformer_engine")
    return folder


def distribution(folder: Path, name: str) -> None:
    """Metadata of an installed package."""
    metadata = folder / f"{name}-2.11.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.11.0\n")


def in_child(path: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the folder on the path: modules of this process are of its own engine."""
    found = os.pathsep.join([str(path), str(ROOT)])
    return subprocess.run(
        [sys.executable, *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": found, **variables},
    )


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Transformer Engine's Python alone, in a folder on the path, without CUDA."""
    monkeypatch.syspath_prepend(str(installed(tmp_path, {})))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path / "transformer_engine"


def test_the_python_alone_runs_on_stand_ins(engine: Path) -> None:
    assert te_finder.python_alone() == engine
    assert te_finder.TEFinder.find_spec("transformer_engine_torch") is not None


def test_the_finder_steps_aside_where_there_is_cuda(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert te_finder.python_alone() is None
    assert te_finder.TEFinder.find_spec("transformer_engine_torch") is None


@pytest.mark.parametrize(
    "library",
    [
        "libtransformer_engine.so",
        "wheel_lib/transformer_engine_torch.cpython-311-x86_64-linux-gnu.so",
        "../transformer_engine_torch.cpython-311-x86_64-linux-gnu.so",
    ],
)
def test_the_finder_steps_aside_for_a_compiled_part(engine: Path, library: str) -> None:
    (engine / library).parent.mkdir(exist_ok=True)
    (engine / library).touch()
    assert te_finder.python_alone() is None


def test_the_finder_steps_aside_for_a_distribution_with_the_libraries(engine: Path) -> None:
    distribution(engine.parent, "transformer_engine_cu13")
    assert te_finder.python_alone() is None


def test_the_finder_is_registered_once_and_only_if_there_is_an_engine(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [finder for finder in sys.meta_path if finder is not te_finder.TEFinder]
    monkeypatch.setattr(sys, "meta_path", [*others])
    te_finder.register()
    te_finder.register()
    assert sys.meta_path == [te_finder.TEFinder, *others]
    monkeypatch.setattr(sys, "meta_path", [*others])
    monkeypatch.setattr(te_finder, "installed_at", lambda: None)
    te_finder.register()
    assert sys.meta_path == others


def test_a_release_whose_source_has_moved_is_named(tmp_path: Path) -> None:
    path = installed(tmp_path, {"common/__init__.py": "def load_framework_extension(): pass\n"})
    done = in_child(path, "-c", "import megapack, transformer_engine.common")
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("megapack.errors.ConfigError: Transformer Engine 2.11.0 cannot run on")
    assert "transformer_engine.common has no " in error


def test_a_kernel_without_a_stand_in_says_its_name_when_it_is_called(tmp_path: Path) -> None:
    code = "import megapack; from transformer_engine_torch import fused_all; fused_all(1)"
    done = in_child(installed(tmp_path, {}), "-c", code)
    assert done.stderr.splitlines()[-1].startswith(
        "NotImplementedError: transformer_engine_torch.fused_all has no stand-in on the CPU"
    )
