"""The vocabulary head over two ranks: Liger's function (its torch fallback) against torch's head.

torchrun --nproc-per-node 2 -m tests.dist.model.liger_worker OUT_DIR
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import launch
from megapack.model.liger import LigerLogprobs, Logprobs
from megapack.model.logprobs import VocabHead, vocab_parallel_logprobs
from tests.liger_python import liger_ops

R, H, V = 12, 8, 20


def results(logprobs: Logprobs) -> list[Tensor]:
    """Log-probs, entropies, and gradients of hidden states and this rank's weight."""
    generator = torch.Generator().manual_seed(3)
    hidden_RH = torch.randn(R, H, generator=generator).requires_grad_()
    rank = dist.get_rank()
    whole_VH = torch.randn(2 * V, H, generator=generator)
    weight_VH = whole_VH[rank * V : (rank + 1) * V].clone().requires_grad_()
    labels_R = torch.randint(0, 2 * V, (R,), generator=generator)
    head = VocabHead(
        weight_VH=weight_VH, tp_group=dist.group.WORLD, temperature=0.7, with_entropy=True
    )
    logprobs_R, entropy_R = logprobs(hidden_RH, labels_R, head)
    assert entropy_R is not None
    factors_R = torch.linspace(-1.0, 2.0, R)
    loss = (factors_R * logprobs_R + factors_R.flip(0) * entropy_R).sum()
    return [logprobs_R, entropy_R, *torch.autograd.grad(loss, (hidden_RH, weight_VH))]


def main(out_dir: str) -> None:
    """Write the largest difference of each result."""
    launch.start("cpu")
    # Liger's function refuses a CPU; its fallback runs there.
    liger_ops()._validate_tp_inputs = lambda *_: None
    pairs = zip(results(LigerLogprobs(5)), results(vocab_parallel_logprobs), strict=True)
    errors = [(got - want).abs().max().item() for got, want in pairs]
    path = Path(out_dir) / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps({"errors": errors}), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
