"""The wheel, installed and used from outside the checkout."""

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

# A checkout on PYTHONPATH would be imported instead of the installed megapack.
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
# The plans are small, and the wheel's own modules would be compiled anew for two minutes.
ENV["NUMBA_DISABLE_JIT"] = "1"

USE = """
import sys
from pathlib import Path

import megapack
from megapack import CostModel, Layout, build_dp_schedule, check_plan
from megapack.config import find_config, load_config
from megapack.job.view.page import page_html
from megapack.job.view.page import plan_page
from megapack.job.config.sections import TrainConfig

assert Path(megapack.__file__).is_relative_to(sys.argv[1]), megapack.__file__
lengths = [700, 300, 500, 900, 100, 250, 800, 640]
plan = build_dp_schedule(lengths, layout=Layout(dp=2, pp=2, vpp=2), max_tokens_per_gpu=1024)
check_plan(plan, lengths)
path = find_config("configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml")
assert path.is_relative_to(sys.argv[1]), path
load_config(path, [], TrainConfig)
# Its model is no folder here; the wheel has the model's config.json.
assert load_config(find_config("qwen3_4b_gpu1"), [], TrainConfig).model.num_layers == 36
page = page_html(plan_page(plan, None, CostModel(per_token=1.0), "s"))
assert "<canvas" in page and "class Timeline" in page
assert "torch" not in sys.modules
print(plan.steps[0].num_microbatches)
"""


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """A copy of the checkout, so that a leftover build folder cannot leak into the wheel."""
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
    """The wheel built from the copy."""
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", out, source)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path, repo_root: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"megapack"}
    modules = {str(path.relative_to(repo_root)) for path in repo_root.glob("megapack/**/*.py")}
    web = {
        f"megapack/job/view/web/{path.name}" for path in repo_root.glob("megapack/job/view/web/*")
    }
    configs = {f"megapack/configs/{path.name}" for path in repo_root.glob("configs/*.yaml")}
    patches = {f"megapack/patches/{path.name}" for path in repo_root.glob("patches/*.yaml")}
    assert modules
    assert web
    assert configs
    assert patches
    expected = {"megapack/py.typed", "megapack-startup.pth", *modules, *configs, *patches, *web}
    assert expected <= set(names)
    assert any(name.endswith("/LICENSE") for name in names)


def environment(folder: Path, *what: str | Path) -> tuple[Path, Path]:
    """A new environment with megapack installed: its interpreter and its site-packages."""
    venv.create(folder)
    python, (site,) = folder / "bin" / "python", folder.glob("lib/python3*/site-packages")
    pip("--python", python, "install", "--no-deps", *what)
    # megapack's dependencies are this interpreter's packages, after the environment's own.
    (site / "_packages.pth").write_text(sysconfig.get_path("purelib"))
    return python, site


def run(folder: Path, *command: str | Path, patch: str = "") -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command run in a folder."""
    done = subprocess.run(
        command,
        env={**ENV, "MEGAPACK_PATCH": patch},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> tuple[Path, Path]:
    """The `environment` of the wheel, for all tests that only read it."""
    return environment(tmp_path_factory.mktemp("installed"), wheel)


def test_the_wheel_plans_from_another_folder(
    installed: tuple[Path, Path], wheel: Path, tmp_path: Path
) -> None:
    python, site = installed
    code, said, why = run(tmp_path, python, "-c", USE, str(site))
    assert code == 0, why
    assert int(said) >= 2
    # The first commands of a new user, by the script that pip installed.
    (tmp_path / "lengths.csv").write_text("num_tokens\n" + "700\n300\n500\n900\n" * 4)
    plan = ("plan", "lengths.csv", "--dp", "2", "--pp", "2", "--vpp", "2")
    for arguments, expected in (
        (("--version",), f"megapack {wheel.name.split('-')[1]}\n"),
        (("patch", "show", "megatron_packing"), "megapack.hosts.megatron_lm"),
        ((*plan, "--max-tokens-per-gpu", "1024"), "plan.json: digest"),
        (("check", "plan.json", "lengths.csv"), "plan.json: sound"),
    ):
        code, said, why = run(tmp_path, python.parent / "megapack", *arguments)
        assert code == 0, why
        assert expected in said


@pytest.mark.parametrize("editable", [False, pytest.param(True, marks=pytest.mark.weekly)])
def test_the_startup_file_is_read(
    editable: bool, installed: tuple[Path, Path], source: Path, tmp_path: Path
) -> None:
    python, _ = environment(tmp_path, "-e", source) if editable else installed
    code = "import sys; print('megapack.hosts.patching' in sys.modules)"
    for flags, patch, done in (
        ((), "slime,verl", (0, "True\n", "")),
        (("-I",), "slime,verl", (0, "False\n", "")),
        ((), "", (0, "False\n", "")),
    ):
        assert run(tmp_path, python, *flags, "-c", code, patch=patch) == done
