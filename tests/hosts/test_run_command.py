"""`megapack run` runs as python with patches; MEGAPACK_PATCH patches new processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megapack.cli import main
from megapack.hosts import startup
from megapack.hosts.patching.files import shipped_hosts

pytestmark = pytest.mark.hosts

# The name that the patches for megatron_lm replace, in a module that needs no torch.
TRAINING = "def get_forward_backward_func(pp_size=None, vp_size=None): return 'host'\n"
LOOK = (
    "from megatron.training.training import get_forward_backward_func as f; print(f.__module__)\n"
)
OURS = "megapack.hosts.megatron_lm"
SCRIPT = f"""\
import json, os, sys
{LOOK}
import helper
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, os.environ.get("MEGAPACK_PATCH")]))
"""


@pytest.fixture
def folder(tmp_path: Path, repo_root: Path) -> Path:
    """Megatron-LM's training module, scripts, and the start-up file."""
    training = tmp_path / "path" / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "__init__.py").write_text("")
    (training / "training.py").write_text(TRAINING)
    (tmp_path / "site").mkdir()
    shutil.copy(repo_root / "megapack-startup.pth", tmp_path / "site")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "helper.py").write_text("")
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    return tmp_path


def python(
    folder: Path, *args: str | Path, patch: str | None = None
) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    env = {name: value for name, value in os.environ.items() if name != startup.VARIABLE}
    env["PYTHONPATH"] = f"{folder / 'path'}:{root}"
    if patch is not None:
        env[startup.VARIABLE] = patch
    return subprocess.run(
        [sys.executable, *map(str, args)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=env,
    )


def test_a_script_runs_as_under_python(folder: Path) -> None:
    script = folder / "scripts" / "train.py"
    done = python(
        folder, "-m", "megapack", "run", "--patch", "megatron_lm", script, "--lr", "1", "-m", "--"
    )
    assert done.returncode == 0, done.stderr
    module, state = done.stdout.splitlines()
    plain = python(folder, script, "--lr", "1", "-m", "--").stdout.splitlines()
    assert module == OURS
    assert plain[0] == "megatron.training.training"
    assert state == plain[1].replace("null", '"megatron_lm"')
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "megapack: megatron_lm: megatron.training.training.get_forward_backward_func is now "
        f"{OURS}.get_forward_backward_func ("
    )


def test_a_script_runs_on_the_cpu(folder: Path) -> None:
    script = folder / "scripts" / "cuda.py"
    script.write_text("import sys, torch\nprint(torch.ones(2).cuda().device, sys.argv[1:])")
    done = python(folder, "-m", "megapack", "run", "--cpu", script, "--cpu")
    assert done.stdout == "cpu ['--cpu']\n", done.stderr
    script.write_text("import sys; print('torch' in sys.modules)")
    assert python(folder, "-m", "megapack", "run", script).stdout == "False\n"


def test_a_module_runs_as_under_python(folder: Path) -> None:
    done = python(
        folder,
        "-m",
        "megapack",
        "run",
        "--patch=megatron_lm",
        "-m",
        "scripts.bare",
        "--x",
        "-m",
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("No module named scripts.bare\n")
    (folder / "scripts" / "bare.py").write_text(f"import sys\n{LOOK}print(sys.argv[1:], __name__)")
    done = python(
        folder,
        "-m",
        "megapack",
        "run",
        "--patch=slime,megatron_lm",
        "-m",
        "scripts.bare",
        "--x",
        "-m",
    )
    assert done.stdout.splitlines() == [OURS, "['--x', '-m'] __main__"]


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("1 / 0", 1, None),
    ],
)
def test_exit_codes_and_tracebacks_are_the_scripts(
    folder: Path, end: str, code: int, says: str | None
) -> None:
    script = folder / "scripts" / "end.py"
    script.write_text(f"import sys\n{end}\n")
    done = python(folder, "-m", "megapack", "run", script)
    plain = python(folder, script)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == plain.stderr
    assert says is None or done.stderr == says


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "nothing to run"),
        (["absent.py"], "absent.py: no such script"),
        (["--patch", "slim", "setup.py"], "no patches for 'slim'"),
        (["--patch", " , slim,", "setup.py"], "no patches for 'slim'"),
        (["--patch", ",", "setup.py"], "--patch ',' names no host; set one, such as slime"),
    ],
)
def test_a_bad_command_prints_one_line(
    args: list[str], says: str, repo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [str(repo_root / arg) if arg == "setup.py" else arg for arg in args]
    assert main(["run", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_torchrun_starts_patched_ranks(folder: Path) -> None:
    done = python(
        folder,
        *("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", "2", "-m", "megapack", "run", "--patch", "megatron_lm"),
        *(folder / "scripts" / "train.py", "--lr", "1"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(OURS) == 2
    assert done.stderr.count("megapack: megatron_lm:") == 1


@pytest.mark.parametrize("what", [("-m", "look"), ("path/look.py",)])
def test_a_safe_path_is_left_as_it_is(folder: Path, what: tuple[str, ...]) -> None:
    (folder / "path" / "look.py").write_text("import sys; print(sys.path)")
    plain, ours = (python(folder, "-P", *run, *what) for run in ((), ("-m", "megapack", "run")))
    assert ours.stdout == plain.stdout != "", ours.stderr


def child(folder: Path, *flags: str, patch: str, code: str = LOOK) -> tuple[int, str, str]:
    """A process that reads the start-up file as if it were in site-packages."""
    path = [str(folder / "path"), str(Path(__file__).resolve().parents[2])]
    start = f"import site, sys; sys.path[:0] = {path}; site.addsitedir({str(folder / 'site')!r})"
    done = python(folder, *flags, "-c", f"{start}\n{code}", patch=patch)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_the_variable_patches_a_new_process(folder: Path) -> None:
    code, out, err = child(folder, patch="megatron_packing, megatron_lm,")
    assert (code, out) == (0, OURS)
    assert err.startswith("megapack: megatron_lm: ")


@pytest.mark.parametrize("patch", ["slim", "./stub.yaml"])
def test_an_unknown_host_ends_a_process_that_imports_a_host(folder: Path, patch: str) -> None:
    (folder / "stub.yaml").write_text("")
    (folder / "path" / "verl.py").write_text("")
    (folder / "path" / "wants.py").write_text("try: import verl\nexcept BaseException: pass")
    for host in ("megatron.training", "wants"):
        code, out, err = child(folder, patch=patch, code=f"print(1); import {host}; print(2)")
        assert (code, out) == (2, "1")
        (line,) = err.splitlines()
        assert line.startswith(f"megapack: MEGAPACK_PATCH: no patches for {patch!r}; ")
        assert ("; did you mean slime? There are " in line) == (patch == "slim")


@pytest.mark.parametrize("patch", [",", " "])
def test_a_value_without_names_ends_a_process_that_imports_a_host(folder: Path, patch: str) -> None:
    code, out, err = child(folder, patch=patch, code="print(1); import megatron.training; print(2)")
    assert (code, out) == (2, "1")
    assert err == (
        f"megapack: MEGAPACK_PATCH: {patch!r} names no host; set one, such as slime, or unset "
        "MEGAPACK_PATCH"
    )


@pytest.mark.parametrize("patch", ["slim", "slime,-verl"])
def test_a_process_without_a_host_ignores_a_wrong_value(folder: Path, patch: str) -> None:
    code = "from importlib.util import find_spec; print(find_spec('megatron.training').name)"
    assert child(folder, patch=patch, code=code) == (0, "megatron.training", "")


def test_patch_list_show_and_diff(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "list"]) == 0
    assert "megatron_lm      names: 1; for Megatron-LM" in capsys.readouterr().out
    assert main(["patch", "show", "megatron_lm"]) == 0
    shown = capsys.readouterr().out
    assert "    looks like (pp_size=None, vp_size=None)\n" in shown
    assert f"    becomes {OURS}.get_forward_backward_func\n" in shown
    assert main(["patch", "diff", "megatron_lm"]) == 0
    added = [line for line in capsys.readouterr().out.splitlines() if line.startswith("+")]
    assert "+    forward_step = megatron_lm.PlannedStep(max_tokens_per_gpu=16384)" in added
    assert main(["patch", "show", "slime"]) == 0
    shown = capsys.readouterr().out
    assert "megatron_core: on, brought by slime; off with MEGAPACK_PATCH=slime,-mega" in shown
    assert "slime_loss: off; on with MEGAPACK_PATCH=slime,slime_loss" in shown
    assert main(["patch", "diff", "slime"]) == 0
    assert "slime needs no change" in capsys.readouterr().out


def test_an_older_version_hides_no_other_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1")
    assert main(["patch", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_hosts())
    too_old = [line.split()[0] for line in lines if "0.1 is installed and the patches are" in line]
    assert too_old == ["megatron_bridge", "skyrl", "slime", "verl_dynamic_cp"]
    assert main(["patch", "show", "slime"]) == 0
    shown = capsys.readouterr().out
    assert "slime: cannot be applied: slime 0.1 is installed" in shown
    assert "megatron_core: on, brought by slime" in shown
    assert main(["patch", "diff", "slime"]) == 2


@pytest.mark.parametrize(("found", "code"), [(TRAINING, 0), ("def other(): pass\n", 1)])
def test_patch_check_has_an_exit_code(folder: Path, found: str, code: int) -> None:
    (folder / "path/megatron/training/training.py").write_text(found)
    done = python(folder, "-m", "megapack", "patch", "check", "megatron_lm")
    assert done.returncode == code, done.stderr
    assert ("fits" in done.stdout) == (code == 0)
