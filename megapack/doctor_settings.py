"""Environment settings that are known to be wrong for training with Megatron-Core, and why.

Sources: torch's pages on CUDA, distributed debugging and ProcessGroupNCCL's variables; NCCL's on
its own; Megatron-Core's `LanguageModule` and `tensor_parallel.layers`; numba's reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class _Rule:
    name: str
    bad: tuple[str, ...]
    """Values, in lower case."""
    why: str


_ON = ("1", "true", "yes", "y", "on")
_OFF = ("0",)

_FAULTS = (
    _Rule("CUDA_LAUNCH_BLOCKING", _ON, "the host waits for every kernel; unset it"),
    # Any value counts.
    _Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON + _OFF, "every tensor is a cudaMalloc; unset it"),
    _Rule(
        "TORCH_NCCL_BLOCKING_WAIT",
        _ON,
        "the host waits for every collective, so that none overlaps with compute; unset it",
    ),
    _Rule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _OFF,
        "ranks wait for ever for one that failed; unset it (3)",
    ),
    _Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        ("detail",),
        "every collective is checked by others before it; set INFO, or unset it",
    ),
    _Rule("PYTHONOPTIMIZE", ("1", "2"), "Megatron checks settings by assert; unset it"),
    _Rule("NUMBA_DISABLE_JIT", _ON, "the planner runs uncompiled, minutes per plan; unset it"),
    *(
        _Rule(
            f"NVTE_{kind}_ATTN",
            _OFF,
            "Megatron's model asserts 1 under attention_backend=auto, which packed rows take; "
            "unset it",
        )
        for kind in ("FLASH", "FUSED", "UNFUSED")
    ),
)

_NOTES = (
    _Rule(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        _OFF,
        "attention takes its deterministic backward, which is slower",
    ),
    _Rule("NCCL_P2P_DISABLE", _ON, "GPUs of a node speak through host memory"),
    _Rule("NCCL_IB_DISABLE", _ON, "nodes speak over TCP, not InfiniBand or RoCE"),
    _Rule("NCCL_SHM_DISABLE", _ON, "GPUs of a node without peer access speak over the network"),
)

# Names that torch has renamed; it warns of each and still reads it.
_RENAMED = {
    f"NCCL_{name}": f"TORCH_NCCL_{name}"
    for name in (
        "ASYNC_ERROR_HANDLING",
        "BLOCKING_WAIT",
        "DESYNC_DEBUG",
        "ENABLE_TIMING",
        "DUMP_ON_TIMEOUT",
    )
}


def check_environment(
    environment: Mapping[str, str], num_cores: int
) -> tuple[list[str], list[str]]:
    """Faults, which no run wants, and notes, which some do; `NAME=value: why`.

    Args:
        num_cores: of this node.
    """
    renamed = {_RENAMED.get(name, name): value for name, value in environment.items()}
    faults = [*_broken(_FAULTS, {**renamed, **environment}), *_threads(environment, num_cores)]
    notes = _broken(_NOTES, environment)
    notes += [
        f"{old}={environment[old]}: torch has renamed it; set {new}"
        for old, new in _RENAMED.items()
        if old in environment
    ]
    return faults, [*notes, *_connections(environment)]


def _broken(rules: tuple[_Rule, ...], environment: Mapping[str, str]) -> list[str]:
    found = ((rule, environment.get(rule.name, "")) for rule in rules)
    return [
        f"{rule.name}={value}: {rule.why}" for rule, value in found if value.lower() in rule.bad
    ]


def _threads(environment: Mapping[str, str], num_cores: int) -> list[str]:
    """Ranks of a node that together want more threads than it has cores only wait for each other;
    without the variable each takes all of them."""
    ranks = _count(environment, "LOCAL_WORLD_SIZE") or _count(environment, "SLURM_NTASKS_PER_NODE")
    threads = environment.get("OMP_NUM_THREADS")
    wanted = (ranks or 1) * (_count(environment, "OMP_NUM_THREADS") or num_cores)
    if (ranks or 1) < 2 or wanted <= num_cores:
        return []
    state = "is not set" if threads is None else f"is {threads}"
    return [
        f"OMP_NUM_THREADS {state}: {ranks} ranks want {wanted} threads of {num_cores} cores; set "
        f"{max(1, num_cores // (ranks or 1))}"
    ]


def _connections(environment: Mapping[str, str]) -> list[str]:
    value = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value == "1":
        return []
    state = "is not set" if value is None else f"is {value}"
    return [
        f"CUDA_DEVICE_MAX_CONNECTIONS {state}: with tp > 1 on Hopper and older Megatron asks for "
        "1, so that collectives start before the products that they overlap with"
    ]


def _count(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() and int(text) else None
