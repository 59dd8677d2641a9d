"""`doctor` reports broken software, even if importing it crashes or hangs the process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from megapack import cli
from megapack.base.megatron import TESTED_RELEASES
from megapack.doctor import probes, runner
from megapack.doctor.probes import Diagnosis, check_environment, run_probe, too_old
from megapack.doctor.runner import diagnose
from megapack.pipeline import kernels

pytestmark = pytest.mark.unit

CRASH = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"
TORCH = "print('{\"faults\": []}', flush=True)\n__version__ = '2.13.0+cu130'"


def stub(folder: Path, modules: dict[str, str]) -> Path:
    """A folder of packages, by dotted name and source."""
    for name, source in modules.items():
        package = folder.joinpath(*name.split("."))
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(source + "\n")
    return folder


def in_child(
    monkeypatch: pytest.MonkeyPatch, *names: str, timeout_s: float = 60
) -> list[Diagnosis]:
    """The diagnoses of these probes in `doctor`'s child."""
    monkeypatch.setattr(runner, "HERE", ())
    monkeypatch.setattr(runner, "IN_CHILD", names)
    return diagnose(timeout_s)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (CRASH, "was ended by SIGSEGV"),
        ("import os; os.write(2, b'no symbol\\n'); os._exit(3)", "ended with code 3 .*: no symbol"),
        ("raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13: no"),
    ],
)
def test_a_broken_torch_is_the_only_fault(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(stub(tmp_path, {"torch": source})))
    torch, cuda, patches = in_child(monkeypatch, "torch", "cuda", "patches")
    (fault,) = torch.faults
    assert re.search(words, fault), fault
    assert (cuda.found, cuda.faults) == ("not probed, torch is broken", [])
    assert patches == Diagnosis(probe="patches", found="not probed, torch is broken")


def test_a_later_crash_is_blamed_on_its_own_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"torch": TORCH, "transformer_engine": "1 / 0", "amp_C": CRASH}
    monkeypatch.syspath_prepend(str(stub(tmp_path, modules)))
    names = ("torch", "transformer_engine", "apex", "megatron")
    torch, engine, apex, megatron = in_child(monkeypatch, *names)
    # Output of torch is not read as an answer.
    assert torch == Diagnosis(probe="torch", found="2.13.0+cu130")
    assert "ZeroDivisionError" in engine.faults[0]
    assert "SIGSEGV" in apex.faults[0]
    assert megatron.found == "not probed, apex is broken"


def test_a_hanging_probe_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    source = (
        "import subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\ntime.sleep(600)"
    )
    monkeypatch.syspath_prepend(str(stub(tmp_path, {"torch": source})))
    (torch,) = in_child(monkeypatch, "torch", timeout_s=5)
    assert torch.faults == ["its probe hangs: no answer within 5 s"]
    state = Path(f"/proc/{pid.read_text()}/stat")
    deadline = time.monotonic() + 20
    # The system takes a moment to remove a killed process.
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("probe", "modules", "found", "words"),
    [
        ("apex", {"apex": "1 / 0"}, "another project's", "pip uninstall apex"),
        ("apex", {"torch": "", "apex": "", "amp_C": "1 / 0"}, "NVIDIA's", "ZeroDivision"),
    ],
)
def test_wrong_versions_and_packages_are_faults(
    probe: str,
    modules: dict[str, str],
    found: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(stub(tmp_path, modules)))
    (diagnosis,) = in_child(monkeypatch, probe)
    assert diagnosis.found.startswith(found)
    (fault,) = diagnosis.faults
    assert words in fault


@pytest.mark.parametrize(
    ("package", "version", "fault"),
    [
        ("torch", "2.13.0+cu130", False),
        ("torch", "2.6.0a0+ecf3bae", False),
        ("torch", "2.5.1", True),
        ("megatron-core", "0.16.1", False),
        ("megatron-core", "0.15.3", True),
        ("transformer-engine", "2.8", True),
    ],
)
def test_old_versions_are_faults(
    package: str, version: str, fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    required = ["torch>=2.6", "megatron-core>=0.16.1"]
    required += [f'transformer-engine[pytorch]>=2.9; extra == "{name}"' for name in ("te", "all")]
    monkeypatch.setattr(probes.metadata, "requires", lambda name: required)
    assert len(too_old(package, version)) == fault


@pytest.mark.parametrize(
    ("version", "note"),
    [("0.17.1", "config.deallocate_pipeline_outputs=False"), ("0.99.0", "newer than tested")],
)
def test_notes_about_megatron(
    version: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"megatron": "", "megatron.core": f"__version__ = '{version}'"}
    modules |= {f"megatron.core.pipeline_parallel{part}": "" for part in ("", ".schedules")}
    monkeypatch.syspath_prepend(str(stub(tmp_path, modules)))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (diagnosis,) = in_child(monkeypatch, "megatron")
    (found,) = diagnosis.notes
    assert note in found


def test_a_lock_that_a_killed_process_left_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = tmp_path / "share_storage_ext" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert probes._left_locks() == []
    an_hour_ago = time.time() - 3600
    os.utime(lock, (an_hour_ago, an_hour_ago))
    (fault,) = probes._left_locks()
    assert fault.startswith(f"{lock} was left 60 minutes ago")


def test_the_tested_versions_include_those_of_the_constraints(repo_root: Path) -> None:
    text = (repo_root / "tools" / "constraints.txt").read_text(encoding="utf-8")
    # The last line of a package is that of the newest Python.
    pinned = dict(line.partition(";")[0].split("==") for line in text.splitlines() if "==" in line)
    assert pinned["megatron-core"] == list(TESTED_RELEASES)[-1]


def test_megapack_gives_megatron_no_upper_bound(repo_root: Path) -> None:
    """A bound makes pip replace what a container has."""
    text = (repo_root / "setup.py").read_text(encoding="utf-8")
    assert re.findall(r'"megatron-core[^"]*"', text) == [
        f'"megatron-core>={next(iter(TESTED_RELEASES))}"'
    ]


def test_versions_are_not_checked_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(probes.metadata, "requires", missing)
    assert too_old("torch", "2.5.1") == []


@pytest.mark.parametrize(
    ("built", "has_driver", "fault", "note"),
    [
        (None, False, None, None),
        (None, True, "torch is a CPU build", None),
        ("13.0", False, None, "no libcuda.so.1"),
        ("13.0", True, "the driver is too old", None),
    ],
)
def test_cuda_builds_and_drivers(
    built: str | None,
    has_driver: bool,
    fault: str | None,
    note: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    def init() -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(probes, "_has_driver", lambda: has_driver)
    diagnosis = run_probe("cuda")
    for texts, words in ((diagnosis.faults, fault), (diagnosis.notes, note)):
        assert len(texts) == (words is not None)
        assert words is None or words in texts[0]


def test_an_unwritable_cache_folder_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "compiled code in" in run_probe("numba").found
    kernel = SimpleNamespace(stats=SimpleNamespace(cache_path=None))
    monkeypatch.setattr(kernels, "rank_seconds", kernel)
    assert "NUMBA_CACHE_DIR" in run_probe("numba").faults[0]


def test_a_patch_missing_in_new_processes_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    (none,) = in_child(monkeypatch, "patches")
    assert none.found == "no patches (MEGAPACK_PATCH names none)"
    # Set after the child's start, as if this Python had no start-up file.
    monkeypatch.setattr(
        runner, "_CHILD", f"import os; os.environ['MEGAPACK_PATCH'] = 'slime'; {runner._CHILD}"
    )
    (slime,) = in_child(monkeypatch, "patches")
    assert "no megapack-startup.pth" in slime.faults[0]
    assert any("slime" in fault and "ModuleNotFoundError" in fault for fault in slime.faults[1:])


@pytest.mark.parametrize("value", ["slmie", ",", "slime,-megatron_coer"])
def test_a_refused_value_of_the_patches_hides_no_other_probe(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """It ended the child at its import of Megatron, which was then what doctor called broken."""
    monkeypatch.setenv("MEGAPACK_PATCH", value)
    (fault,) = [fault for fault in run_probe("environment").faults if "MEGAPACK_PATCH" in fault]
    assert "did you mean" in fault or "names no host" in fault
    megatron, patches = in_child(monkeypatch, "megatron", "patches")
    assert (megatron.broken, patches.broken) == (False, False)


def test_the_command_prints_json_and_ends_with_1(tmp_path: Path, repo_root: Path) -> None:
    path = os.pathsep.join([str(stub(tmp_path, {"torch": CRASH})), str(repo_root)])
    done = subprocess.run(
        [sys.executable, "-m", "megapack", "doctor", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": path},
    )
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr, report["num_faults"]) == (1, "", 1)
    assert [one["probe"] for one in report["probes"]] == [*runner.HERE, *runner.IN_CHILD]
    assert {one["probe"] for one in report["probes"] if one["faults"]} == {"torch"}


def test_without_a_fault_it_ends_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "HERE", ("python",))
    monkeypatch.setattr(runner, "IN_CHILD", ())
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 fault(s)"


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING=1: the host waits"),
        ({"NCCL_BLOCKING_WAIT": "true"}, "TORCH_NCCL_BLOCKING_WAIT=true: "),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "ranks wait for ever"),
        ({"NVTE_FUSED_ATTN": "0"}, "NVTE_FUSED_ATTN=0: Megatron asserts 1"),
        ({"NVTE_FUSED_ATTN": "1", "PYTHONHASHSEED": "7"}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, "OMP_NUM_THREADS is not set: 8 ranks want 128 threads of 16"),
        ({"LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "4"}, "OMP_NUM_THREADS is 4"),
        ({"LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "2"}, None),
        ({"SLURM_NTASKS_PER_NODE": "4"}, "set 4"),
    ],
)
def test_settings_known_to_be_wrong(environment: dict[str, str], fault: str | None) -> None:
    faults, _ = check_environment(environment, num_cores=16)
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]


RIGHT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({}, None),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "CUDA_DEVICE_MAX_CONNECTIONS is 8: with tp > 1"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": None}, "CUDA_DEVICE_MAX_CONNECTIONS is not set: with tp"),
        ({"PYTORCH_CUDA_ALLOC_CONF": None}, "PYTORCH_CUDA_ALLOC_CONF is not set: megapack train"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
            "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128: rows of changing lengths fragment",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:9, expandable_segments:True"}, None),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, None),
    ],
)
def test_settings_that_some_runs_need_are_notes(
    changes: dict[str, str | None], start: str | None
) -> None:
    environment = {k: v for k, v in {**RIGHT, **changes}.items() if v is not None}
    faults, notes = check_environment(environment, 16)
    assert faults == []
    assert len(notes) == (start is not None), notes
    assert start is None or notes[0].startswith(start)
