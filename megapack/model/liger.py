"""Liger's tensor-parallel fused linear cross entropy as the kernel of the vocabulary head.

`LigerFusedLinearScaledCrossEntropyTPFunction` of liger-kernel 0.8.5 gives a negative log-likelihood
and an entropy per token over a vocabulary that is split over ranks, without writing logits to
memory. Its native kernels (package liger-cute-kernels, bf16, Hopper and Blackwell) exchange numbers
through NVSHMEM, whose memory all ranks of the group reserve before the first call. Without them the
function computes logits with torch and rounds them to bf16; that path is never used here.

The native kernels are compiled code, and no document states how they round. `largest_error`
therefore compares them with `logprobs` on the machine before a run uses them.

Shape suffixes: R response positions, C positions of a call, H hidden, V vocabulary on this rank.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import cpu
from megapack.base.choices import HeadChoice, HeadKernel
from megapack.cost.head import default_chunk_tokens
from megapack.errors import ConfigError, one_line
from megapack.model.head import find_output_layer, marked_logit_cap, unwrapped
from megapack.model.logprobs import (
    VocabHead,
    in_vocabulary,
    main_gradient,
    rest_of_gradient,
    vocab_parallel_logprobs,
)
from megapack.ranks.agree import agree

logger = logging.getLogger(__name__)

Logprobs = Callable[[Tensor, Tensor, VocabHead], tuple[Tensor, Tensor | None]]
"""`vocab_parallel_logprobs`, or another function of its arguments and results."""

MOST_ERROR_NATS = 1e-3
"""Largest difference of a log-prob with which "auto" takes Liger's kernel. fp32 sums in another
order differ by about 1e-5 (docs/exactness.md), logits rounded to bf16 by 0.02."""

# Relative. bf16 rounds an element by up to 1/256, 0.4 %, a few times on the way.
_MOST_GRADIENT_ERROR = 0.02

# Positions of the comparison: one tile of the kernels.
_COMPARED = 128

_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class ChosenHead:
    """The kernel of the vocabulary head in this job."""

    kernel: HeadKernel = "torch"
    note: str = ""
    """Why it is not Liger's, or by how much Liger's log-probs differ; "" if nothing is to say."""
    logprobs: Logprobs = vocab_parallel_logprobs

    def __str__(self) -> str:
        return f"head {self.kernel}" + (f" ({self.note})" if self.note else "")


def choose_head(
    choice: HeadChoice,
    chunk: torch.nn.Module,
    config: Any,
    tp_group: Any,
    *,
    num_ids: int | None = None,
    chunk_tokens: int | None,
    device: torch.device,
) -> ChosenHead:
    """The kernel that the last stage uses, the same on all ranks; a collective of all of them.

    Args:
        chunk: this rank's last chunk.
        config: the model's.
        num_ids, chunk_tokens: see `VocabHead`.

    Raises:
        ConfigError: Liger's kernel is requested and cannot run here.
        ScheduleError: it can run on some ranks only.
    """
    if choice == "torch":
        return ChosenHead()
    reason = obstacle(torch.bfloat16 if config.bf16 else config.params_dtype)
    reason = reason or _padding_obstacle(chunk, num_ids, tp_group)
    if marked_logit_cap(chunk) is not None:
        reason = reason or "it does not cap logits (model.logit_cap)"
    kernel: HeadKernel = "torch" if reason else "liger"
    agree(lambda: _check(choice, reason), device=device, same={"head kernel": kernel})
    if reason is not None:
        return ChosenHead(note=f"not liger: {reason}")
    logprobs, error_nats, failure = _compared(chunk, tp_group, num_ids, chunk_tokens)
    worst = torch.tensor(error_nats, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    error_nats = float(worst.item())
    agree(lambda: _raise(failure if choice == "liger" else None), device=device)
    note = f"its log-probs differ from those of fp32 logits by up to {error_nats:.1e} nats"
    if choice == "auto" and not error_nats <= MOST_ERROR_NATS:
        return ChosenHead(note=f"not liger: {note}")
    return ChosenHead(kernel="liger", note=note, logprobs=logprobs)


def _check(choice: HeadChoice, reason: str | None) -> None:
    if choice == "liger" and reason is not None:
        raise ConfigError(
            f"model.head_kernel=liger cannot run here: {reason}; set model.head_kernel=auto or "
            "torch"
        )


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _compared(
    chunk: torch.nn.Module, tp_group: Any, num_ids: int | None, chunk_tokens: int | None
) -> tuple[Logprobs, float, Exception | None]:
    """Liger's kernel, its error in nats, which is 0 on ranks that have no head, and its failure."""
    gpt = unwrapped(chunk)
    if not gpt.post_process:
        return vocab_parallel_logprobs, 0.0, None
    weight = find_output_layer(chunk).weight
    weight_VH = gpt.shared_embedding_or_output_weight() if weight is None else weight
    try:
        head = VocabHead(weight_VH=weight_VH, num_ids=num_ids, tp_group=tp_group)
        logprobs = reserve(replace(head, chunk_tokens=chunk_tokens))
        error_nats = largest_error(logprobs, head)
        # The largest of all ranks is taken, in which a NaN may be lost.
        return logprobs, error_nats if math.isfinite(error_nats) else math.inf, None
    except Exception as error:
        logger.warning("Liger's head kernel failed: %s", error)
        return vocab_parallel_logprobs, math.inf, error


def obstacle(dtype: torch.dtype) -> str | None:
    """Why Liger's kernel cannot run here; None if it can."""
    if not cpu.uses_cuda():
        return "the device is not CUDA"
    if dtype != torch.bfloat16:
        return f"its kernels take bf16, the model is {str(dtype).removeprefix('torch.')}"
    for package in ("liger_kernel", "liger_cute_kernels"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package.replace('_', '-')} is not installed"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0) and capability[0] != 10:
        return "the GPU has compute capability {}.{}, it needs 9.0 or 10.x".format(*capability)
    try:
        from liger_kernel.ops.configure import configure  # noqa: F401
        from liger_kernel.ops.cute.fused_linear_scaled_cross_entropy_tp import is_available

        is_there = is_available()
    except Exception as error:  # its import looks for the GPU's libraries, too
        return f"liger-kernel does not import, 0.8.5 or later is needed: {one_line(error)}"
    return None if is_there else "the libraries of liger-cute-kernels do not load"


def _padding_obstacle(chunk: torch.nn.Module, num_ids: int | None, tp_group: Any) -> str | None:
    """Why Liger's kernel cannot leave out this vocabulary's padding; None if it can.

    It numbers the ids of all ranks by the rows of one.
    """
    rows = getattr(unwrapped(chunk), "vocab_size", num_ids)
    if num_ids is None or rows == num_ids or tp_group.size() == 1:
        return None
    return (
        f"the vocabulary of {num_ids} ids is padded to {rows} rows, and its kernels take equally "
        "many ids of each tensor-parallel rank"
    )


@dataclass(frozen=True)
class LigerLogprobs:
    """`vocab_parallel_logprobs` by Liger's kernel; the same arguments and results.

    Args:
        max_tokens: positions of one call, as reserved by `reserve`.
    """

    max_tokens: int

    def __call__(
        self, hidden_RH: Tensor, labels_R: Tensor, head: VocabHead
    ) -> tuple[Tensor, Tensor | None]:
        """See `vocab_parallel_logprobs`. Each call's weight gradient is bf16; their sum is
        fp32 in DDP's gradients, bf16 without DDP."""
        # The kernel refuses tensors without positions.
        if not labels_R.numel():
            return vocab_parallel_logprobs(hidden_RH, labels_R, head)
        valid_R = in_vocabulary(labels_R, head)
        targets_R = torch.where(valid_R, labels_R, _IGNORED).long()
        starts = range(0, targets_R.numel(), self.max_tokens)
        calls = [slice(start, start + self.max_tokens) for start in starts]
        parts = [self._call(hidden_RH[call], targets_R[call], head, call) for call in calls]
        nll_R = torch.cat([nll_C for nll_C, _ in parts])
        logprobs_R = (-nll_R).masked_fill(~valid_R, math.nan)
        entropies = [entropy_C for _, entropy_C in parts if entropy_C is not None]
        return logprobs_R, torch.cat(entropies).float() if head.with_entropy else None

    def _call(
        self, hidden_CH: Tensor, targets_C: Tensor, head: VocabHead, call: slice
    ) -> tuple[Tensor, Tensor | None]:
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyTPFunction

        weight_VH = _Weight.apply(  # type: ignore[no-untyped-call]
            head.weight_VH, head, call.start == 0
        )
        outputs = LigerFusedLinearScaledCrossEntropyTPFunction.apply(
            hidden_CH.contiguous(),
            weight_VH,
            targets_C,
            head.tp_group,
            temperature=head.temperature,
            ignore_index=_IGNORED,
            return_entropy=head.with_entropy,
        )
        return outputs if head.with_entropy else (outputs, None)


class _Weight(torch.autograd.Function):
    """The ids' rows of the weight of one call, without padding.

    The backward adds the call's gradient to DDP's fp32 gradient.
    """

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, head: VocabHead, is_first: bool) -> Tensor:
        ctx.head = head
        ctx.is_first = is_first
        return weight_VH[: head.num_rows].view_as(weight_VH[: head.num_rows])

    @staticmethod
    def backward(ctx: Any, grad_VH: Tensor) -> tuple[Tensor | None, None, None]:
        head: VocabHead = ctx.head
        main_grad = main_gradient(head.weight_VH)
        if main_grad is None:
            padding = head.weight_VH.shape[0] - head.num_rows
            return torch.nn.functional.pad(grad_VH, (0, 0, 0, padding)), None, None
        main_grad[: head.num_rows].add_(grad_VH)
        rest = rest_of_gradient(head.weight_VH, tied=head.tied) if ctx.is_first else None
        return rest, None, None


def reserve(head: VocabHead) -> LigerLogprobs:
    """Reserve the kernels' memory; a collective of the ranks that share the vocabulary."""
    from liger_kernel.ops.configure import FusedLinearCrossEntropyConfig, configure

    hidden_size = head.weight_VH.shape[1]
    max_tokens = head.chunk_tokens or default_chunk_tokens(head.vocab_size, head.num_ranks)
    configure(
        process_groups={"tp": head.tp_group},
        bootstrap_group=head.tp_group,
        device=head.weight_VH.device,
        flsce=FusedLinearCrossEntropyConfig(
            max_tokens=max_tokens,
            hidden_size=hidden_size,
            local_vocab_size=head.num_rows,
            group="tp",
        ),
    )
    return LigerLogprobs(max_tokens)


def largest_error(logprobs: LigerLogprobs, head: VocabHead) -> float:
    """Largest difference from `vocab_parallel_logprobs` in nats, of log-probs or of entropies.

    The logits have a standard deviation of 4, like those of a trained model. A collective of the
    ranks that share the vocabulary.

    Returns:
        Infinity if the gradients differ by more than bf16 rounds them.
    """
    # Without DDP's gradients, so that none are added there.
    weight_VH = head.weight_VH.detach().requires_grad_()
    head = replace(head, weight_VH=weight_VH, with_entropy=True, chunk_tokens=_COMPARED)
    generator = torch.Generator().manual_seed(0)
    hidden_RH = torch.randn(_COMPARED, weight_VH.shape[1], generator=generator)
    labels_R = torch.randint(0, head.num_ids or head.vocab_size, (_COMPARED,), generator=generator)
    squares = head.all_reduce(weight_VH.detach().float().square().sum())
    scale = 4 / (squares / head.vocab_size).sqrt().clamp(min=1e-6)
    hidden_RH = (hidden_RH.to(weight_VH.device) * scale).to(weight_VH.dtype).requires_grad_()
    labels_R = labels_R.to(weight_VH.device)

    def results(function: Logprobs) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            logprobs_R, entropy_R = function(hidden_RH, labels_R, head)
            assert entropy_R is not None
            loss = (logprobs_R + 0.1 * entropy_R).sum()
            return logprobs_R, entropy_R, *torch.autograd.grad(loss, (hidden_RH, weight_VH))

    got = [value.detach().float() for value in results(logprobs)]
    want = [value.detach().float() for value in results(vocab_parallel_logprobs)]
    for found, exact in zip(got[2:], want[2:], strict=True):
        if not (found - exact).norm() <= _MOST_GRADIENT_ERROR * exact.norm():
            return math.inf
    errors = [(found - exact).abs().max() for found, exact in zip(got[:2], want[:2], strict=True)]
    return float(torch.stack(errors).max().item())
