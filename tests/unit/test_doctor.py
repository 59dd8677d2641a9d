"""`doctor`: what is broken is told, whatever it does to the process that imports it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megapack import cli, doctor
from megapack.doctor import Diagnosis, diagnose
from megapack.doctor_probes import MEGATRON, PYTHON, TORCH
from megapack.doctor_settings import check_environment

pytestmark = pytest.mark.unit

CRASH = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"


def stub(folder: Path, modules: dict[str, str]) -> Path:
    """A folder of packages, by dotted name and source."""
    for name, source in modules.items():
        package = folder.joinpath(*name.split("."))
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(source + "\n")
    return folder


def probed(
    monkeypatch: pytest.MonkeyPatch, probes: dict[str, tuple[str, ...]], timeout_s: float = 60
) -> list[Diagnosis]:
    monkeypatch.setattr(doctor, "PROBES", probes)
    return diagnose(timeout_s)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (CRASH, "was ended by SIGSEGV"),
        ("import os; os.write(2, b'no symbol\\n'); os._exit(3)", "ended with code 3 .*: no symbol"),
        ("raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13: no"),
    ],
)
def test_a_broken_torch_is_told_and_what_needs_it_is_left(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(stub(tmp_path, {"torch": source})))
    torch, cuda = probed(monkeypatch, {"torch": (), "cuda": ("torch",)})
    (fault,) = torch.faults
    assert re.search(words, fault), fault
    assert (cuda.found, cuda.faults) == ("not probed, torch is broken", ())


def test_what_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    source = (
        "import subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\ntime.sleep(600)"
    )
    monkeypatch.syspath_prepend(str(stub(tmp_path, {"torch": source})))
    (torch,) = probed(monkeypatch, {"torch": ()}, timeout_s=5)
    assert torch.faults == ("its probe hangs: no answer within 5 s",)
    state, deadline = Path(f"/proc/{pid.read_text()}/stat"), time.monotonic() + 20
    # A killed process is gone when the system comes to it.
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_part_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "print('{\"faults\": []}', flush=True)\n__version__ = '2.13.0+cu130'"
    monkeypatch.syspath_prepend(str(stub(tmp_path, {"torch": source})))
    (torch,) = probed(monkeypatch, {"torch": ()})
    assert torch == Diagnosis(probe="torch", found="2.13.0+cu130")


@pytest.mark.parametrize(
    ("probe", "modules", "found", "words"),
    [
        (
            "cuda",
            {"torch": "class version: cuda = '99.1'"},
            "torch is built for 99.1",
            ("no libcuda.so.1", "update the driver"),
        ),
        ("torch", {"torch": "__version__ = '2.5.1'"}, "2.5.1", ("install 2.6 or newer, below 3",)),
        (
            "megatron",
            {"megatron": "", "megatron.core": "__version__ = '0.15.3'"}
            | {f"megatron.core.pipeline_parallel{part}": "" for part in ("", ".schedules")},
            "megatron-core 0.15.3",
            ("install 0.16.1 or newer, below 0.20",),
        ),
        (
            "transformer_engine",
            {"transformer_engine": "__version__ = '1.4.0'", "transformer_engine.pytorch": ""},
            "1.4.0",
            ("version 1.4.0; install 2",),
        ),
        ("apex", {"apex": "1 / 0"}, "another project's", ("pip uninstall apex",)),
        ("apex", {"torch": "", "apex": "", "amp_C": "1 / 0"}, "NVIDIA's", ("ZeroDivision",)),
    ],
)
def test_wrong_versions_and_impostors(
    probe: str,
    modules: dict[str, str],
    found: str,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(stub(tmp_path, modules)))
    (diagnosis,) = probed(monkeypatch, {probe: ()})
    assert diagnosis.found.startswith(found)
    (said,) = diagnosis.faults + diagnosis.notes
    assert any(word in said for word in words), said


def test_compiled_code_that_nowhere_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    (kept,) = probed(monkeypatch, {"numba": ()})
    assert "compiled code in" in kept.found
    # One that finds no folder for a module in a file.
    monkeypatch.setenv("NUMBA_CACHE_LOCATOR_CLASSES", "IPythonCacheLocator")
    (lost,) = probed(monkeypatch, {"numba": ()})
    assert "NUMBA_CACHE_DIR" in lost.faults[0]


def test_a_patch_that_new_processes_do_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    (none,) = probed(monkeypatch, {"patches": ()})
    assert none.found == "none asked for (MEGAPACK_PATCH is not set)"
    # A Python that ignores the variable at its start, as one without the start-up file does.
    monkeypatch.setattr(
        doctor, "_CHILD", f"import os; os.environ['MEGAPACK_PATCH'] = 'slime'; {doctor._CHILD}"
    )
    (slime,) = probed(monkeypatch, {"patches": ()})
    assert "no megapack-startup.pth" in slime.faults[0]
    assert any("slime" in fault and "ModuleNotFoundError" in fault for fault in slime.faults[1:])


def test_the_command_tells_programs_and_ends_with_1(tmp_path: Path, repo_root: Path) -> None:
    path = os.pathsep.join([str(stub(tmp_path, {"torch": CRASH})), str(repo_root)])
    done = subprocess.run(
        [sys.executable, "-m", "megapack", "doctor", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": path},
    )
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr, told["num_faults"]) == (1, "", 1)
    assert [probe["probe"] for probe in told["probes"]] == list(doctor.PROBES)
    broken = {probe["probe"] for probe in told["probes"] if probe["faults"]}
    assert broken == {"torch"}


def test_without_a_fault_it_ends_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PROBES", {"python": ()})
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 fault(s)"
    assert cli.main(["doctor", "--timeout", "0"]) == 2


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING=1: the host waits"),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, None),
        ({"NCCL_BLOCKING_WAIT": "true"}, "TORCH_NCCL_BLOCKING_WAIT=true: "),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "ranks wait for ever"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, None),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        ({"PYTHONOPTIMIZE": "1"}, "assert"),
        ({"NVTE_FUSED_ATTN": "0"}, "NVTE_FUSED_ATTN=0: Megatron's model asserts 1"),
        ({"NVTE_FUSED_ATTN": "1", "PYTHONHASHSEED": "7"}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, "OMP_NUM_THREADS is not set: 8 ranks want 128 threads of 16"),
        ({"LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "4"}, "OMP_NUM_THREADS is 4"),
        ({"LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "2"}, None),
        ({"SLURM_NTASKS_PER_NODE": "4"}, "set 4"),
        ({"LOCAL_WORLD_SIZE": "1"}, None),
    ],
)
def test_settings_known_to_be_wrong(environment: dict[str, str], fault: str | None) -> None:
    faults, _ = check_environment(environment, num_cores=16)
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]


def test_settings_that_some_runs_want() -> None:
    assert check_environment({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 16) == ([], [])
    (note,) = check_environment({}, 16)[1]
    assert note.startswith("CUDA_DEVICE_MAX_CONNECTIONS is not set: with tp > 1")
    _, notes = check_environment(
        {"NCCL_ASYNC_ERROR_HANDLING": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}, 16
    )
    assert "set TORCH_NCCL_ASYNC_ERROR_HANDLING" in notes[0]
    assert notes[1].startswith("CUDA_DEVICE_MAX_CONNECTIONS is 8")


def test_ranges_are_those_of_the_package(repo_root: Path) -> None:
    text = (repo_root / "setup.py").read_text()
    python, torch, least, below = (
        ".".join(map(str, numbers)) for numbers in (PYTHON[0], TORCH[0], *MEGATRON)
    )
    assert f'python_requires=">={python}"' in text
    assert f'"torch>={torch}"' in text
    assert f'"megatron-core>={least},<{below}"' in text
