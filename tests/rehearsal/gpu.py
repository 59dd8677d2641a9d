"""A process that believes it has a Hopper GPU, for programs that refuse to run without one.

    REHEARSE=1 tools/gpu_check.sh

puts `startup` and Transformer Engine's Python on PYTHONPATH, so that every Python process calls
`pretend` right after its import of torch. Everything then runs on the CPU: megapack's branches for
CUDA, Megatron-Core by `megapack.cpu`, Transformer Engine's Python on stand-ins of its kernels
(`megapack.cpu.te`), NCCL's groups over gloo, torch's varlen attention by `varlen_attention`, its
flash operations by `tests.rehearsal.flash`.
Events are the host's clock, and the device's memory is the process's: neither says anything of a
GPU.

A tensor's own device stays the CPU, so code that asks a tensor takes its CPU branch. Reads that
would make the host wait for a GPU pass: `set_sync_debug_mode` takes its modes and does nothing.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from wrapt import register_post_import_hook

from megapack import te_finder
from tests.rehearsal.flash import band, register_on_cpu

NAME = "a CPU that rehearses a Hopper GPU"
CAPABILITY = (9, 0)
CUDA = "13.0"
# torch's names of no waits, a warning and an error.
_SYNC_MODES = {"default": 0, "warn": 1, "error": 2}
_for_life: list[torch.library.Library] = []


def pretend() -> None:
    """Let this process find a GPU, for the rest of its life. Call it right after torch's import."""
    # Its finder steps aside where torch has CUDA, so it is asked before torch says so.
    folder = te_finder.python_alone()
    te_finder.python_alone = lambda: folder

    from megapack import cpu

    cpu.enable(CAPABILITY)
    cpu.uses_cuda = lambda: True
    torch.version.cuda = CUDA
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "get_device_name": lambda device=None: NAME,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "reset_peak_memory_stats": _reset_peak,
    }
    for name in ("allocated", "reserved"):
        answers[f"memory_{name}"] = lambda device=None: _memory_bytes("VmRSS")
        answers[f"max_memory_{name}"] = lambda device=None: _memory_bytes("VmHWM")
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    Tensor.pin_memory = lambda self, device=None: self
    torch.backends.cuda.is_flash_attention_available = lambda: True
    _for_life.append(register_on_cpu())
    register_post_import_hook(_replace_varlen, "torch.nn.attention.varlen")
    others = torch.cuda.current_device
    torch.cuda.current_device = lambda: _current_device(others)


def _set_sync_debug_mode(mode: int | str) -> None:
    if mode not in (*_SYNC_MODES, *_SYNC_MODES.values()):
        raise RuntimeError(f"invalid value of debug_mode: {mode!r}")


def _memory_bytes(name: str) -> int:
    """The process's resident memory (VmRSS) or its peak (VmHWM)."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, name
    return int(found[1]) * 1024


def _reset_peak(device: Any = None) -> None:
    # proc(5): 5 resets the peak of resident memory.
    Path("/proc/self/clear_refs").write_text("5")


def _current_device(others: Callable[[], Any]) -> Any:
    """0 for megapack's start, whose device is "cuda:" and the number; else the CPU's."""
    asker = sys._getframe(2).f_globals["__name__"]
    return 0 if asker == "megapack.launch" else others()


def _replace_varlen(varlen: ModuleType) -> None:
    # Under its own signature, which callers read.
    varlen.varlen_attn = functools.wraps(varlen.varlen_attn)(varlen_attention)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """torch's `varlen_attn`, causal, sample by sample in fp32.

    Args:
        query: [Q, H, D]; key, value: [K, G, D].
        cu_seq_q, cu_seq_k: int32 [S + 1], the ends of the samples; a sample's last query sees its
            last key.
        max_q, max_k: upper bounds of a sample's queries and keys.

    Returns:
        [Q, H, D].

    Raises:
        KernelFault: the kernel would refuse this, read past a tensor, or leave out tokens.
    """
    from megapack.cpu.te.calls import require

    require(
        query.dtype in (torch.bfloat16, torch.float16) and query.dtype == key.dtype == value.dtype,
        f"varlen attention takes bf16 or fp16: {query.dtype}, {key.dtype}, {value.dtype}",
    )
    heads, width = query.shape[1:]
    groups = key.shape[1]
    require(width % 8 == 0 and width <= 256, f"heads of {width} channels")
    require(key.shape == value.shape, f"keys {list(key.shape)}, values {list(value.shape)}")
    require(heads % groups == 0, f"{heads} heads over {groups} groups")
    require(enable_gqa or heads == groups, f"{heads} heads over {groups} groups need enable_gqa")
    require(
        window_size[0] >= -1 and window_size[1] == 0,
        f"only causal attention is rehearsed: {window_size}",
    )
    ends = []
    for table, tensor, most in ((cu_seq_q, query, max_q), (cu_seq_k, key, max_k)):
        require(table.dtype == torch.int32, f"cu_seqlens of {table.dtype}, not int32")
        require(isinstance(most, int), f"a bound of lengths is {type(most).__name__}, not int")
        ends.append(table.tolist())
        lengths = [b - a for a, b in zip(ends[-1], ends[-1][1:], strict=False)]
        require(
            ends[-1][0] == 0 and min(lengths) >= 0 and ends[-1][-1] == len(tensor),
            f"cu_seqlens {ends[-1]} of {len(tensor)} tokens",
        )
        require(max(lengths) <= most, f"a sample of {max(lengths)} tokens, the bound is {most}")
    require(len(ends[0]) == len(ends[1]), f"{len(ends[0]) - 1} and {len(ends[1]) - 1} samples")
    scale = width**-0.5 if scale is None else scale
    outs = []
    for i in range(len(ends[0]) - 1):
        one, two = (slice(end[i], end[i + 1]) for end in ends)
        q_HQD = query[one].float().transpose(0, 1)
        k_HKD, v_HKD = (
            x[two].float().transpose(0, 1).repeat_interleave(heads // groups, dim=0)
            for x in (key, value)
        )
        num_queries, num_keys = q_HQD.shape[1], k_HKD.shape[1]
        require(num_queries <= num_keys, f"{num_queries} queries of {num_keys} keys")
        seen_QK = band(num_queries, num_keys, window_size[0])
        scores_HQK = (q_HQD @ k_HKD.transpose(1, 2) * scale).masked_fill(~seen_QK, -torch.inf)
        outs.append((scores_HQK.softmax(-1) @ v_HKD).transpose(0, 1))
    return torch.cat(outs).to(query.dtype)
