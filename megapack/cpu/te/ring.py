"""What a context-parallel ring does with packed rows between its steps (context_parallel.cu).

A rank's slice of a sample has two halves, chunks r and 2 * cp - 1 - r of the sample. Tables hold
the ends of slices; with ends [0, 4, 10] the first halves are tokens 0, 1 and 4, 5, 6.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megapack.cpu.te.calls import kernel, require
from megapack.cpu.te.precision import wide


class WaitedOnce:
    """A request that may be waited for twice, as the ring's backward does.

    NCCL's may; gloo's would wait for ever the second time.
    """

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        """Wait for the exchange, if that has not been done."""
        if self._request is not None:
            self._request.wait()
            self._request = None


def _halves(cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each token of all halves: its number, the begin of its half, and the half's end."""
    require(cu_seqlens.dtype == torch.int32, f"cu_seqlens of {cu_seqlens.dtype}")
    require(bool((cu_seqlens % 2 == 0).all()), f"slices without halves: {cu_seqlens.tolist()}")
    ends = cu_seqlens.long() // 2
    sample = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())
    return torch.arange(int(ends[-1])), ends[sample], ends[sample + 1]


def _first(cu_seqlens: Tensor) -> Tensor:
    token, begin, _ = _halves(cu_seqlens)
    return token + begin


def _second(cu_seqlens: Tensor) -> Tensor:
    token, _, end = _halves(cu_seqlens)
    return token + end


@kernel
def thd_read_half_tensor(t: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """First (0) or second (1) halves of rows [t, h, d], or of keys and values [2, t, h, d]."""
    require(t.is_contiguous() and t.dim() in (3, 4), f"rows {tuple(t.shape)}, {t.stride()}")
    dim = t.dim() - 3
    shape = list(t.shape)
    shape[dim] //= 2
    out = t.new_zeros(shape)
    tokens = (_second if half_idx else _first)(cu_seqlens)
    out.narrow(dim, 0, len(tokens)).copy_(t.index_select(dim, tokens))
    return out


@kernel
def thd_second_half_lse_correction(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool
) -> None:
    """Add a step's statistics [h, t/2] to those of the second halves in lse [h, t]."""
    _check_packed(lse, lse_packed)
    at = _second(cu_seqlens)
    lse[:, at] = torch.logaddexp(lse[:, at], lse_per_step[:, : len(at)])


@kernel
def thd_read_second_half_lse(
    lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> Tensor:
    """Statistics of the second halves [h, second_half_lse_seqlen]."""
    _check_packed(lse, lse_packed)
    at = _second(cu_seqlens)
    out = lse.new_zeros(lse.shape[0], second_half_lse_seqlen)
    out[:, : len(at)] = lse[:, at]
    return out


@kernel
def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Add a step's output, weighted by its share exp(lse_per_step - lse), to out [t, h, d]."""
    _check_packed(lse, lse_packed)
    require(out.dtype == out_per_step.dtype, f"{out.dtype} and {out_per_step.dtype}")
    at = _second(cu_seqlens) if only_second_half else torch.arange(int(cu_seqlens[-1]))
    share = (lse_per_step[:, : len(at)] - lse[:, at]).exp().t()[..., None]
    total = out.view(len(out), lse.shape[0], -1)
    part = out_per_step.view(len(out_per_step), lse.shape[0], -1)[: len(at)]
    total[at] = (wide(total[at]) + wide(part) * share).to(out.dtype)


@kernel
def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Copy or add a step's gradients to the halves; "none" leaves a half, "zero" clears it."""
    has_both = {first_half, second_half} <= {"copy", "add"}
    halves = ((first_half, _first(cu_seqlens)), (second_half, _second(cu_seqlens)))
    for action, at in halves:
        if action == "none":
            continue
        if action == "zero":
            grad[at] = 0
            continue
        # A step of both halves has their tokens in place, a step of one half has it alone.
        part = grad_per_step[at] if has_both else grad_per_step[: len(at)]
        grad[at] = part if action == "copy" else grad[at] + part


@kernel
def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> Tensor:
    """Positions of a rank's slices in the whole row."""
    picked = []
    for begin, end in pairwise(cu_seqlens.tolist()):
        length = end - begin
        require(length % (2 * world_size) == 0, f"{length} tokens for 2 * {world_size} chunks")
        chunks = torch.arange(begin, end).chunk(2 * world_size)
        picked += [chunks[rank], chunks[2 * world_size - 1 - rank]]
    return torch.cat(picked).int()


def _check_packed(lse: Tensor, packed: bool) -> None:
    require(
        packed and lse.dim() == 2 and lse.is_contiguous(),
        f"statistics {tuple(lse.shape)} that are not packed, as from cuDNN before 9.6",
    )
