"""The probes of `doctor`, as its child processes run them: `main(NAME)` prints one JSON object."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from megapack.apex import OTHER_APEX, find_apex
from megapack.doctor_settings import check_environment

# As setup.py asks for them; from the first, below the second.
PYTHON = ((3, 11), (4,))
TORCH = ((2, 6), (3,))
MEGATRON = ((0, 16, 1), (0, 20))


@dataclass
class Answer:
    """What a probe tells."""

    found: str = ""
    broken: bool = False
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def main(probe: str) -> None:
    """Run one probe; what its part prints goes to stderr."""
    answers_to = os.dup(1)
    os.dup2(2, 1)
    answer = Answer()
    try:
        _PROBES[probe](answer)
    except Exception as error:  # an import of something broken raises anything
        answer.broken = True
        what = " ".join(str(error).split())
        answer.faults.append(f"{type(error).__name__}: {what}")
    with os.fdopen(answers_to, "w") as out:
        json.dump(vars(answer), out)


def _python(answer: Answer) -> None:
    from megapack import __file__ as place

    answer.found = f"{platform.python_version()}, {sys.executable}; megapack in {place}"
    _check_range(answer, platform.python_version(), PYTHON)


def _torch(answer: Answer) -> None:
    import torch

    answer.found = torch.__version__
    _check_range(answer, torch.__version__, TORCH)


def _cuda(answer: Answer) -> None:
    import torch

    built, driver = torch.version.cuda, _driver_cuda()
    answer.found = f"torch is built for {built or 'the CPU'}, the driver " + (
        f"serves {driver[0]}.{driver[1]}" if driver else "is not there"
    )
    if built is None:
        if driver is not None:
            answer.faults.append("torch is a CPU build and there is a GPU; install a CUDA build")
        return
    if driver is None:
        answer.notes.append("no libcuda.so.1: only device=cpu runs here")
        return
    if int(built.partition(".")[0]) > driver[0]:
        answer.faults.append(
            f"the driver serves CUDA {driver[0]}.{driver[1]} and torch needs {built}; update the "
            f"driver, or install a torch for CUDA {driver[0]}"
        )
        return
    if not torch.cuda.is_available():
        answer.faults.append("torch finds no GPU; see CUDA_VISIBLE_DEVICES and nvidia-smi")
        return
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    answer.found += f"; {torch.cuda.device_count()} x {', '.join(sorted(names))}"
    # A build without code for this GPU fails here and not before.
    torch.ones(2, device="cuda").add(1).sum().item()


def _driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver serves; None without a driver."""
    try:
        library, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return None
    if library.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _nccl(answer: Answer) -> None:
    import torch
    import torch.distributed as dist

    if torch.version.cuda is None:
        answer.found = "none, torch is a CPU build"
    elif not dist.is_nccl_available():
        answer.found = "none"
        answer.faults.append("torch was built without NCCL; install a build that has it")
    else:
        nccl: Any = torch.cuda.nccl
        answer.found = ".".join(map(str, nccl.version()))


def _megatron(answer: Answer) -> None:
    import megatron.core
    import megatron.core.pipeline_parallel.schedules

    version = str(megatron.core.__version__)
    answer.found = f"megatron-core {version}, {os.path.dirname(megatron.core.__file__)}"
    _check_range(answer, version, MEGATRON)


def _transformer_engine(answer: Answer) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        answer.found = "not installed"
        answer.notes.append(
            "packed rows take torch's varlen attention or SDPA; context parallelism and FP8 need it"
        )
        return
    importlib.import_module("transformer_engine.pytorch")
    version = str(sys.modules["transformer_engine"].__version__)
    answer.found = version
    wanted = _range_that_megatron_asks()
    if wanted is not None:
        _check_range(answer, version, wanted)


def _range_that_megatron_asks() -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Of Transformer Engine, from megatron-core's own metadata."""
    try:
        asked = metadata.requires("megatron-core") or []
    except metadata.PackageNotFoundError:
        return None
    for line in asked:
        low, high = re.search(r">=([\d.]+)", line), re.search(r"<([\d.]+)", line)
        if line.startswith("transformer-engine") and low and high:
            return _numbers(low[1]), _numbers(high[1])
    return None


def _apex(answer: Answer) -> None:
    found = find_apex()
    answer.found = {"nvidia": "NVIDIA's", "other": "another project's", "none": "not installed"}[
        found
    ]
    if found == "other":
        answer.faults.append(OTHER_APEX)
    if found == "nvidia":
        importlib.import_module("torch")
        importlib.import_module("amp_C")


def _numba(answer: Answer) -> None:
    import numba

    from megapack.pipeline_kernels import rank_seconds

    answer.found = numba.__version__
    # Uncompiled under NUMBA_DISABLE_JIT, which the environment's probe tells.
    stats = getattr(rank_seconds, "stats", None)
    if stats is None:
        return
    if stats.cache_path is None:
        answer.faults.append(
            "no folder for compiled code can be written, so that every process compiles the "
            "planner anew; set NUMBA_CACHE_DIR to one that can"
        )
    else:
        answer.found += f", compiled code in {stats.cache_path}"


def _patches(answer: Answer) -> None:
    from megapack import patching
    from megapack.startup import VARIABLE, asked_hosts

    if sys.flags.ignore_environment:
        answer.found = f"{VARIABLE} is ignored (-E or -I)"
        return
    hosts = asked_hosts(os.environ.get(VARIABLE, ""))
    if not hosts:
        answer.found = f"none asked for ({VARIABLE} is not set)"
        return
    applied = {status.host for status in patching.status()}
    answer.found = f"{VARIABLE}={','.join(hosts)}"
    answer.faults += [
        f"{host} is not patched in a new process: this Python has no megapack-startup.pth; "
        "pip install megapack into it"
        for host in hosts
        if host not in applied
    ]
    findings = [finding for host in hosts for finding in patching.check(host)]
    answer.faults += [f"{one.target}: {one.problem}" for one in findings if one.problem]
    answer.found += f", {len(findings)} names"


def _environment(answer: Answer) -> None:
    answer.faults, answer.notes = check_environment(os.environ, len(os.sched_getaffinity(0)))
    answer.found = f"{len(answer.faults)} settings known to be wrong"


def _check_range(
    answer: Answer, version: str, wanted: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    least, below = wanted
    if not least <= _numbers(version) < below:
        low, high = (".".join(map(str, numbers)) for numbers in wanted)
        answer.faults.append(f"version {version}; install {low} or newer, below {high}")


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cu130` is (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))


_PROBES: dict[str, Callable[[Answer], None]] = {
    "python": _python,
    "torch": _torch,
    "cuda": _cuda,
    "nccl": _nccl,
    "megatron": _megatron,
    "transformer_engine": _transformer_engine,
    "apex": _apex,
    "numba": _numba,
    "patches": _patches,
    "environment": _environment,
}
