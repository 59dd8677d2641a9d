"""Peak memory of the vocabulary head, forward and backward: whole logits compared with chunks.

    python tools/bench_head_memory.py [--device cuda] [--chunk-tokens 1024]
    python tools/bench_head_memory.py --against CHECKOUT    # the head of another commit

Each way runs in a separate process, which reports how far its peak is above its start: of the
resident set on a CPU, of allocated memory on CUDA. The weight has an fp32 gradient to which a hook
adds autograd's, as in Megatron's DDP. `--against` runs the chunked head of this checkout and of
another one in turns and compares their peaks and seconds (of the processor on a CPU).

Shape suffixes: T row tokens, R response positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megapack.model.logprobs import VocabHead, vocab_parallel_logprobs

MIB = 2**20
ROOT = Path(__file__).resolve().parents[1]


def whole(hidden_RH: torch.Tensor, weight_VH: torch.Tensor, labels_R: torch.Tensor) -> torch.Tensor:
    """Log-probs from the logits of all positions at once."""
    logits_RV = (hidden_RH @ weight_VH.t()).float()
    return -F.cross_entropy(logits_RV, labels_R, reduction="none")


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


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
    return measure_both(way, options)[0]


def measure_both(way: str, options: argparse.Namespace) -> tuple[float, float]:
    """Peak MiB of one forward and backward above the memory at its start, and its seconds."""
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
    untied = {"tied": False} if "tied" in VocabHead.__dataclass_fields__ else {}
    head = VocabHead(weight_VH=weight_VH, chunk_tokens=options.chunk_tokens, **untied)
    vocab_parallel_logprobs(hidden_TH[:8], labels_T[:8], head)[0].sum().backward()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    num_positions = int(options.tokens * options.response) if response_only else options.tokens
    before = peak_bytes(options.device)
    started_s = seconds(options.device)
    hidden_RH = hidden_TH[-num_positions:]
    labels_R = labels_T[-num_positions:]
    if chunked:
        logprobs_R, _ = vocab_parallel_logprobs(hidden_RH, labels_R, head)
    else:
        logprobs_R = whole(hidden_RH, weight_VH, labels_R)
    logprobs_R.mean().backward()
    took_s = seconds(options.device) - started_s
    return (peak_bytes(options.device) - before) / MIB, took_s


WAYS = ["whole", "whole, response only", "chunks", "chunks, response only"]


def in_process(way: str, checkout: Path) -> tuple[float, float]:
    """`measure_both` in a process of its own, with the megapack of a checkout."""
    command = [sys.executable, *sys.argv, "--way", way]
    path = os.pathsep.join([str(checkout.resolve()), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    mib, took_s = run.stdout.split()
    return float(mib), float(took_s)


def compare(checkout: Path, rounds: int) -> None:
    """Print medians over rounds in which the two heads take turns."""
    runs: dict[Path, list[tuple[float, float]]] = {checkout: [], ROOT: []}
    for _ in range(rounds):
        for path, own in runs.items():
            own.append(in_process("chunks", path))
    mib, took_s = (
        [statistics.median(run[i] for run in own) for own in runs.values()] for i in (0, 1)
    )
    print("| head | peak MiB | seconds | ratio of peaks | ratio of seconds |")
    print("|---|---|---|---|---|")
    for i, path in enumerate(runs):
        ratios = f"{mib[i] / mib[0]:.2f} | {took_s[i] / took_s[0]:.2f}"
        print(f"| {path.resolve().name} | {mib[i]:.0f} | {took_s[i]:.2f} | {ratios} |")


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
    parser.add_argument("--against", metavar="CHECKOUT", help="compare with this checkout's head")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each head for --against")
    options = parser.parse_args()
    if options.way:
        print(*measure_both(options.way, options))
        return
    print(
        f"{options.tokens} tokens, vocabulary {options.vocab}, hidden {options.hidden}, "
        f"{options.dtype}, chunks of {options.chunk_tokens} tokens, {options.device}\n"
    )
    if options.against:
        compare(Path(options.against), options.rounds)
        return
    peak_mib = {way: in_process(way, ROOT)[0] for way in WAYS}
    print("| way | peak MiB | of whole |")
    print("|---|---|---|")
    for way, mib in peak_mib.items():
        print(f"| {way} | {mib:.0f} | {mib / peak_mib['whole']:.3f} |")


if __name__ == "__main__":
    main()
