"""The wheel, installed and used far from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

USE = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path

import megapack
from megapack import CostModel, Layout, build_dp_schedule, check_plan
from megapack.config import find_config, load_config
from megapack.page import page_html
from megapack.page_data import plan_page
from megapack.train_config import TrainConfig

assert Path(megapack.__file__).is_relative_to(sys.argv[1]), megapack.__file__
lengths = [700, 300, 500, 900, 100, 250, 800, 640]
plan = build_dp_schedule(lengths, layout=Layout(dp=2, pp=2, vpp=2), max_tokens_per_gpu=1024)
check_plan(plan, lengths)
path = find_config("configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml")
assert path.is_relative_to(sys.argv[1]), path
load_config(path, [], TrainConfig)
page = page_html(plan_page(plan, None, CostModel(per_token=1.0), "s"))
assert "<canvas" in page and "class Timeline" in page
assert "torch" not in sys.modules
print(plan.steps[0].num_microbatches)
"""


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """A copy: a build folder left in the checkout must not leak into a wheel."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repo_root,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.split("\0") if (repo_root / name).is_file()]
    assert "setup.py" in names
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((repo_root / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """Built from the copy."""
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", out, source)
    (built,) = out.glob("*.whl")
    return built


def test_it_holds_the_package_and_nothing_else(wheel: Path, repo_root: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"megapack"}
    modules = {str(path.relative_to(repo_root)) for path in repo_root.glob("megapack/**/*.py")}
    web = {f"megapack/web/{path.name}" for path in repo_root.glob("megapack/web/*")}
    configs = {f"megapack/configs/{path.name}" for path in repo_root.glob("configs/*.yaml")}
    patches = {f"megapack/patches/{path.name}" for path in repo_root.glob("patches/*.yaml")}
    assert modules
    assert web
    assert configs
    assert patches
    expected = {"megapack/py.typed", "megapack-startup.pth", *modules, *configs, *patches, *web}
    assert expected <= set(names)
    assert any(name.endswith("/LICENSE") for name in names)


def test_it_plans_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip("install", "--no-deps", "--target", target, wheel)
    assert (target / "bin" / "megapack").is_file()
    done = subprocess.run(
        [sys.executable, "-c", USE, str(target)],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2


@pytest.mark.parametrize("editable", [False, True])
def test_the_startup_file_is_read(
    editable: bool, wheel: Path, source: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path)
    python, (site,) = tmp_path / "bin" / "python", tmp_path.glob("lib/python3*/site-packages")
    pip("--python", python, "install", "--no-deps", *(["-e", source] if editable else [wheel]))
    # What megapack needs, behind its own folder.
    packages = sysconfig.get_path("purelib")
    (site / "_packages.pth").write_text(packages)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import sys; print('megapack.patching' in sys.modules)"
    for flags, patch, done in (
        ((), "slime,verl", (0, "True\n", "")),
        (("-I",), "slime,verl", (0, "False\n", "")),
        ((), "", (0, "False\n", "")),
    ):
        found = subprocess.run(
            [python, *flags, "-c", code],
            env={**env, "MEGAPACK_PATCH": patch},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (found.returncode, found.stdout, found.stderr) == done
