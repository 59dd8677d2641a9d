"""The probes of `doctor`: versions, apex, CUDA, patches, and rules for environment variables.

Sources of the rules: torch's pages on CUDA, distributed debugging and ProcessGroupNCCL's variables;
NCCL's page on its variables; Megatron-Core's `LanguageModule` and `tensor_parallel.layers`; numba's
reference.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from megapack.base.apex import OTHER_APEX, find_apex
from megapack.base.gpu_environment import ALLOCATOR, ALLOCATORS, CONNECTIONS, EXPANDABLE
from megapack.base.megatron import frees_while_sending, newer_than_tested
from megapack.base.te import refuse_broken_te
from megapack.errors import ConfigError
from megapack.hosts import patching
from megapack.hosts.patching.files import patch_set
from megapack.hosts.startup import VARIABLE, asked_hosts
from megapack.te_finder import python_alone

_ON = ("1", "true", "yes", "y", "on")
_OFF = ("0",)
_ASSERTS_1 = "Megatron asserts 1 under attention_backend=auto, which packed rows use; unset it"

# Of an extension: seconds on a usual machine.
_LONGEST_COMPILE_S = 600.0

_Rules = dict[str, tuple[tuple[str, ...], str]]
"""Variable -> its bad values in lower case, and why they are bad."""

_FAULTS: _Rules = {
    "CUDA_LAUNCH_BLOCKING": (_ON, "the host waits for every kernel; unset it"),
    # Any value turns it on, 0 too.
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_ON + _OFF, "every tensor is a cudaMalloc; unset it"),
    "TORCH_NCCL_BLOCKING_WAIT": (_ON, "no collective overlaps with compute; unset it"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (_OFF, "ranks wait for ever for a failed one; unset it"),
    "TORCH_DISTRIBUTED_DEBUG": (("detail",), "every collective is checked; set INFO, or unset it"),
    "PYTHONOPTIMIZE": (("1", "2"), "Megatron checks settings by assert; unset it"),
    "NUMBA_DISABLE_JIT": (_ON, "the planner runs uncompiled, many times slower; unset it"),
    "NVTE_FLASH_ATTN": (_OFF, _ASSERTS_1),
    "NVTE_FUSED_ATTN": (_OFF, _ASSERTS_1),
    "NVTE_UNFUSED_ATTN": (_OFF, _ASSERTS_1),
}
_NOTES: _Rules = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": (
        _OFF,
        "attention takes its slower, deterministic backward; on Hopper packed rows then need "
        "flash-attn 2 or model.attention=varlen",
    ),
}


@dataclass(kw_only=True)
class Diagnosis:
    """What one probe found."""

    probe: str
    found: str = ""
    """Versions, paths, device names; one line."""
    broken: bool = False
    """The probe raised, or its process ended without an answer."""
    faults: list[str] = field(default_factory=list)
    """What is wrong and what to do."""
    notes: list[str] = field(default_factory=list)
    """Settings that are right for some runs only, and a Megatron-Core that is newer than tested."""


def run_probe(name: str) -> Diagnosis:
    """Run one probe in this process."""
    diagnosis = Diagnosis(probe=name)
    try:
        _PROBES[name](diagnosis)
    except Exception as error:  # importing a broken package can raise anything
        diagnosis.broken = True
        diagnosis.faults.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return diagnosis


def not_probed(name: str, broken: str) -> Diagnosis:
    """The diagnosis of a probe that comes after a broken one."""
    return Diagnosis(probe=name, found=f"not probed, {broken} is broken")


def main(names: Sequence[str]) -> None:
    """Run probes in `doctor`'s child and print one JSON object per line and probe to stdout.

    The output of imported packages goes to stderr. Without torch no other probe can work.
    """
    torch_is_broken = False
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for name in names:
            diagnosis = not_probed(name, "torch") if torch_is_broken else run_probe(name)
            torch_is_broken |= name == "torch" and diagnosis.broken
            print(json.dumps(asdict(diagnosis)), file=answers, flush=True)


def check_environment(
    environment: Mapping[str, str], num_cores: int
) -> tuple[list[str], list[str]]:
    """Faults (wrong for every run) and notes (right for some runs), as `NAME=value: why`.

    Args:
        environment: the variables.
        num_cores: CPU cores of this node.
    """
    # torch still reads the names that these had: NCCL_BLOCKING_WAIT for TORCH_NCCL_BLOCKING_WAIT.
    renamed = {f"TORCH_{name}": value for name, value in environment.items() if "NCCL_" in name}
    faults = _broken_rules(_FAULTS, {**renamed, **environment})
    notes = _broken_rules(_NOTES, environment)
    connections = environment.get(CONNECTIONS, "not set")
    if connections != "1":
        notes.append(
            f"{CONNECTIONS} is {connections}: with tp > 1 or cp > 1 on Hopper and older it should "
            "be 1, so that collectives start before the matrix products that they overlap with; "
            "megapack train sets it there if it is not set"
        )
    notes += _check_allocator(environment)
    return [*faults, *_check_threads(environment, num_cores)], notes


def _check_allocator(environment: Mapping[str, str]) -> list[str]:
    """Notes about torch's allocator: rows of changing lengths need segments that can grow."""
    given = {name: environment[name] for name in ALLOCATORS if name in environment}
    if not given:
        return [
            f"{ALLOCATOR} is not set: megapack train sets {EXPANDABLE}; a loop of your own should, "
            "because rows of changing lengths fragment memory"
        ]
    return [
        f"{name}={text}: rows of changing lengths fragment memory; add {EXPANDABLE}"
        for name, text in given.items()
        if EXPANDABLE not in text.replace(" ", "").split(",")
    ]


def _broken_rules(rules: _Rules, environment: Mapping[str, str]) -> list[str]:
    return [
        f"{name}={environment[name]}: {why}"
        for name, (bad, why) in rules.items()
        if environment.get(name, "").lower() in bad
    ]


def _check_threads(environment: Mapping[str, str], num_cores: int) -> list[str]:
    """Report ranks of a node that together start more threads than it has cores.

    Without OMP_NUM_THREADS each rank starts a thread per core.
    """
    ranks = _count(environment, "LOCAL_WORLD_SIZE") or _count(environment, "SLURM_NTASKS_PER_NODE")
    wanted = ranks * (_count(environment, "OMP_NUM_THREADS") or num_cores)
    if ranks < 2 or wanted <= num_cores:
        return []
    return [
        f"OMP_NUM_THREADS is {environment.get('OMP_NUM_THREADS', 'not set')}: {ranks} ranks want "
        f"{wanted} threads of {num_cores} cores; set {max(1, num_cores // ranks)}"
    ]


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0


def _python(diagnosis: Diagnosis) -> None:
    from megapack import __file__ as path

    version = platform.python_version()
    diagnosis.found = f"{version}, {sys.executable}; megapack in {path}"


def _numba(diagnosis: Diagnosis) -> None:
    import numba

    from megapack.base.jit import cache_folder
    from megapack.pipeline import kernels

    diagnosis.found = numba.__version__
    # Under NUMBA_DISABLE_JIT, which has a rule above, it is a plain function without stats.
    stats = getattr(kernels.rank_seconds, "stats", None)
    if stats is not None and stats.cache_path is None:
        diagnosis.faults.append(
            "no cache folder for compiled code is writable, so every process compiles the planner "
            "again; set NUMBA_CACHE_DIR to a writable folder"
        )
    elif stats is not None:
        diagnosis.found += f", compiled code in {cache_folder()}"


def _environment(diagnosis: Diagnosis) -> None:
    num_cores = len(os.sched_getaffinity(0))
    diagnosis.faults, diagnosis.notes = check_environment(os.environ, num_cores)
    diagnosis.faults += refused_patches()
    diagnosis.found = f"{len(diagnosis.faults)} settings known to be wrong"


def _torch(diagnosis: Diagnosis) -> None:
    import torch

    diagnosis.found = torch.__version__
    diagnosis.faults = too_old("torch", torch.__version__)


def _cuda(diagnosis: Diagnosis) -> None:
    import torch

    diagnosis.found = f"torch is built for {torch.version.cuda or 'the CPU'}"
    if torch.version.cuda is None:
        if _has_driver():
            diagnosis.faults.append("torch is a CPU build and there is a GPU; install a CUDA build")
        return
    if not torch.distributed.is_nccl_available():
        diagnosis.faults.append("torch was built without NCCL; install a build that has it")
    if not _has_driver():
        diagnosis.notes.append("no libcuda.so.1: only device=cpu runs here")
        return
    # Raises, with the reason, if no GPU is visible or the driver is too old for the build.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    count = torch.cuda.device_count()
    diagnosis.found += f"; {count} x {torch.cuda.get_device_name()}"
    # A build without code for this GPU fails at its first kernel only.
    torch.ones(2, device="cuda").add(1).sum().item()


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _transformer_engine(diagnosis: Diagnosis) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        diagnosis.found = "not installed"
        diagnosis.notes.append(
            "packed rows use torch's varlen attention or SDPA; context parallelism and FP8 need it"
        )
        return
    refuse_broken_te()
    importlib.import_module("transformer_engine.pytorch")
    diagnosis.found = str(sys.modules["transformer_engine"].__version__)
    if python_alone() is not None:
        diagnosis.found += ", its Python on stand-ins of its kernels, for device=cpu"
        diagnosis.notes.append(
            "a program that imports megatron.core before megapack ends in Transformer Engine's "
            "error; import megapack first, or start it by `megapack run --cpu`"
        )
        return
    diagnosis.faults = too_old("transformer-engine", diagnosis.found)


def _apex(diagnosis: Diagnosis) -> None:
    found = find_apex()
    names = {"nvidia": "NVIDIA's", "other": "another project's", "none": "not installed"}
    diagnosis.found = names[found]
    if found == "other":
        diagnosis.faults.append(OTHER_APEX)
    if found == "nvidia":
        importlib.import_module("torch")  # amp_C needs torch's libraries
        importlib.import_module("amp_C")


def _megatron(diagnosis: Diagnosis) -> None:
    import megatron.core
    import megatron.core.pipeline_parallel.schedules

    version = str(megatron.core.__version__)
    diagnosis.found = f"megatron-core {version}, {os.path.dirname(megatron.core.__file__)}"
    diagnosis.faults = [*too_old("megatron-core", version), *_left_locks()]
    diagnosis.notes += filter(None, [newer_than_tested(version)])
    if frees_while_sending(version):
        diagnosis.notes.append(
            f"virtual pipeline stages of megatron-core {version} free an output while it is being "
            "sent: over gloo they train wrongly; set config.deallocate_pipeline_outputs=False, or "
            "apply the patch megatron_core, or install 0.18.2"
        )


def too_old(package: str, version: str) -> list[str]:
    """A fault if an imported package's version is below what the installed megapack requires."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    try:
        requirements = [Requirement(text) for text in metadata.requires("megapack") or []]
    except metadata.PackageNotFoundError:  # a source tree has no metadata
        return []
    # NVIDIA's containers have builds such as 2.6.0a0+ecf3bae, which no range of releases contains.
    release = Version(Version(version).base_version)
    # Two extras may have the same requirement.
    ranges = {one.specifier for one in requirements if one.name == package}
    return [
        f"version {version}; install {package}{each}"
        for each in ranges
        if not each.contains(release)
    ]


def _left_locks() -> list[str]:
    """Faults: locks of torch's compiled extensions whose process was killed.

    Megatron-Core compiles one since 0.17, in the first backward that recomputes parts of layers.
    torch's lock is a file; where it was left, every later process waits for it for ever.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    folders = [Path(root)] if root else sorted(Path(get_default_build_root()).glob("*"))
    ages_s = {
        lock: time.time() - lock.stat().st_mtime
        for folder in folders
        for lock in sorted(folder.glob("*/lock"))
    }
    return [
        f"{lock} was left {age_s / 60:.0f} minutes ago, and a step that needs this extension waits "
        "for it for ever; delete it, unless a process compiles it now"
        for lock, age_s in ages_s.items()
        if age_s > _LONGEST_COMPILE_S
    ]


def _attention(diagnosis: Diagnosis) -> None:
    """Report a GPU on which Transformer Engine would not run packed rows in a fused kernel."""
    from megapack.model.attention.choice import choose_attention, obstacle
    from megapack.model.attention.te_backend import AttentionSizes, te_obstacle

    # Those of Qwen3-4B and Qwen3-8B; a run asks for its own.
    sizes = AttentionSizes(heads=32, groups=8, head_width=128)
    diagnosis.found = f"{choose_attention('auto', 'bf16', sizes)} in bf16 for {sizes}"
    reason = te_obstacle(sizes) if obstacle("te") is None else None
    if reason is not None:
        diagnosis.notes.append(
            f"Transformer Engine is passed over: {reason}; model.attention=te would be refused"
        )


def refused_patches() -> list[str]:
    """A fault if MEGAPACK_PATCH has a value that ends every process which imports a host."""
    try:
        sys.flags.ignore_environment or patch_set(asked_hosts(os.environ.get(VARIABLE, "")))
    except ConfigError as error:
        return [f"{VARIABLE}: {error}"]
    return []


def _patches(diagnosis: Diagnosis) -> None:
    if sys.flags.ignore_environment:
        diagnosis.found = f"{VARIABLE} is ignored (-E or -I)"
        return
    hosts = asked_hosts(os.environ.get(VARIABLE, ""))
    if not hosts:
        diagnosis.found = f"no patches ({VARIABLE} names none)"
        return
    applied = {status.host for status in patching.status()}
    diagnosis.faults += [
        f"{file.host} is not patched in a new process: this Python has no megapack-startup.pth; "
        "pip install megapack into it"
        for file in patch_set(hosts)
        if file.host not in applied
    ]
    findings = patching.check(*hosts)
    diagnosis.faults += [f"{found.target}: {found.problem}" for found in findings if found.problem]
    diagnosis.found = f"{VARIABLE}={','.join(hosts)}, {len(findings)} names"


_PROBES: dict[str, Callable[[Diagnosis], None]] = {
    "python": _python,
    "numba": _numba,
    "environment": _environment,
    "torch": _torch,
    "cuda": _cuda,
    "transformer_engine": _transformer_engine,
    "apex": _apex,
    "megatron": _megatron,
    "attention": _attention,
    "patches": _patches,
}
