"""Peak memory of the vocabulary head, forward and backward: whole logits compared with chunks.

    python tools/bench_head_memory.py [--device cuda] [--chunk-tokens 1024] [--measured]

Each way runs in a separate process, which reports how far its peak is above its start: of the
resident set on a CPU, of allocated memory on CUDA. The weight has an fp32 gradient to which a hook
adds autograd's, as in Megatron's DDP. `--measured` writes docs/measured/head_memory.md.

Shape suffixes: T row tokens, R response positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack.model.logprobs import VocabHead, vocab_parallel_logprobs
from tools.pages.marks import table
from tools.pages.measured import versions, write

MIB = 2**20


def whole(hidden_RH: torch.Tensor, weight_VH: torch.Tensor, labels_R: torch.Tensor) -> torch.Tensor:
    """Log-probs from the logits of all positions at once."""
    logits_RV = (hidden_RH @ weight_VH.t()).float()
    return -F.cross_entropy(logits_RV, labels_R, reduction="none")


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def like_ddp(weight: Any) -> None:
    """Give a weight the main gradient and the hook of Megatron's DDP."""
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.grad_added_to_main_grad = False

    def add_to_main(weight: Any) -> None:
        if not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    weight.register_post_accumulate_grad_hook(add_to_main)


def measure(way: str, options: argparse.Namespace) -> float:
    """Peak MiB of one forward and backward above the memory at its start."""
    chunked = "chunks" in way
    response_only = "response" in way
    torch.manual_seed(0)
    kind = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    hidden_TH = torch.randn(options.tokens, options.hidden, **kind).requires_grad_()
    weight_VH = torch.randn(options.vocab, options.hidden, **kind).requires_grad_()
    labels_T = torch.randint(options.vocab, (options.tokens,), device=options.device)
    # Allocate the gradients first: a training step has their buffers anyway.
    hidden_TH.grad = torch.zeros_like(hidden_TH)
    like_ddp(weight_VH)
    # A small warm-up loads libraries, so that their memory is not measured.
    head = VocabHead(weight_VH=weight_VH, chunk_tokens=options.chunk_tokens, tied=False)
    vocab_parallel_logprobs(hidden_TH[:8], labels_T[:8], head)[0].sum().backward()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    num_positions = int(options.tokens * options.response) if response_only else options.tokens
    before = peak_bytes(options.device)
    hidden_RH = hidden_TH[-num_positions:]
    labels_R = labels_T[-num_positions:]
    if chunked:
        logprobs_R, _ = vocab_parallel_logprobs(hidden_RH, labels_R, head)
    else:
        logprobs_R = whole(hidden_RH, weight_VH, labels_R)
    logprobs_R.mean().backward()
    return (peak_bytes(options.device) - before) / MIB


# The ways, and how the table calls them.
WAYS = {
    "whole": "whole logits",
    "whole, response only": "whole logits, response only",
    "chunks": "chunks",
    "chunks, response only": "chunks, response only (the default)",
}


def in_process(way: str) -> float:
    """`measure` in a process of its own."""
    command = [sys.executable, *sys.argv, "--way", way]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=4096, help="row tokens")
    parser.add_argument("--response", type=float, default=0.5, help="share that is response")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--way", choices=WAYS, help="measure only this way, in this process")
    parser.add_argument("--measured", action="store_true", help="write docs/measured as well")
    options = parser.parse_args()
    if options.way:
        print(measure(options.way, options))
        return
    what = (
        f"One forward and backward of {options.tokens:,} tokens, {options.response:.0%} of them "
        f"response, vocabulary {options.vocab:,}, hidden size {options.hidden}, {options.dtype}, "
        f"chunks of {options.chunk_tokens} tokens, {options.device}. Each way has a process of its "
        "own; MiB above the start."
    )
    peak_mib = {way: in_process(way) for way in WAYS}
    rows = [
        (WAYS[way], f"{mib:.0f}", f"{mib / peak_mib['whole']:.3f}") for way, mib in peak_mib.items()
    ]
    body = table(["way", "peak MiB", "of whole"], rows)
    print(f"{what}\n\n{body}")
    if options.measured:
        title = "Peak memory of the vocabulary head"
        write("head_memory", title, what, [body], versions("torch"))


if __name__ == "__main__":
    main()
