"""Times attention by sample length and a layer's matrix by tokens on one GPU.

    python tools/benching/gpu_kernels.py OUT.json SECONDS [--rehearse]

`tools/bench_gpu.py` starts it as its own process. Two assumptions of the cost model from sizes are
held against these times: that attention costs one number per squared token of a sample, and that a
matrix costs one number per token of a row. OUT.json is rewritten after each line.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megapack import launch
from megapack.model.attention.choice import obstacle
from megapack.model.attention.packed import packed_seq_params
from megapack.model.attention.paths import key_paths
from megapack.model.attention.row import row_view
from megapack.model.attention.varlen import varlen_causal_attention
from megapack.rows.slices import slice_positions
from megapack.rows.transfer import moved

logger = logging.getLogger("bench_gpu")
LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
TOKENS = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
RANKS = [2, 4, 8]
REPEATS = 7
BUSY_CYCLES = 4_000_000
"""About 2 ms."""


@dataclass(frozen=True)
class Sizes:
    """Of the kernels; those of Qwen3-4B."""

    heads: int = 32
    groups: int = 8
    width: int = 128
    hidden: int = 2560
    ffn: int = 9728
    row_tokens: int = 16384
    """Of a row of short samples, so that kernels fill the GPU."""
    longest: int = LENGTHS[-1]
    device: str = "cuda"

    def attention_inputs(self, queries: int, keys: int) -> list[Tensor]:
        """Queries, keys and values."""
        shapes = [(queries, self.heads), (keys, self.groups), (keys, self.groups)]
        return self.drawn([(*shape, self.width) for shape in shapes])

    def attention_flops(self, length: int, samples: int) -> int:
        """Of a causal forward."""
        return 2 * self.heads * self.width * length**2 * samples

    def drawn(self, shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """Random tensors."""
        generator = torch.Generator(device=self.device).manual_seed(0)
        options = {"generator": generator, "device": self.device, "dtype": torch.bfloat16}
        return [torch.randn(shape, **options) for shape in shapes]


TINY = Sizes(
    heads=4, groups=2, width=16, hidden=64, ffn=128, row_tokens=512, longest=512, device="cpu"
)


def milliseconds(run: Callable[[], Any], device: str) -> float:
    """Median time of a call, after two calls that warm up."""
    times = []
    for _ in range(REPEATS + 2):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The host launches all of a call's kernels while the device is busy with this.
            torch.cuda._sleep(BUSY_CYCLES)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[2:])


def both_ways(attend: Callable[..., Tensor], inputs: list[Tensor], device: str) -> dict[str, float]:
    """Milliseconds of a forward, and of a backward."""
    with torch.no_grad():
        forward = milliseconds(lambda: attend(*inputs), device)
    out = attend(*(x.requires_grad_() for x in inputs))
    grad = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, inputs, grad, retain_graph=True)

    return {"forward_ms": forward, "backward_ms": milliseconds(backward, device)}


def whole_samples(kernel: str, length: int, sizes: Sizes) -> dict[str, float]:
    """A row of equal samples on one rank."""
    count = max(1, sizes.row_tokens // length)
    ends = torch.arange(count + 1, dtype=torch.int32, device=sizes.device) * length
    row = packed_seq_params(ends, length, count * length)
    attend = (te_attention if kernel == "te" else varlen_attention)(row, sizes)
    inputs = sizes.attention_inputs(count * length, count * length)
    found = both_ways(attend, inputs, sizes.device)
    return {"samples": count, "flops": sizes.attention_flops(length, count), **found}


def te_attention(row: PackedSeqParams, sizes: Sizes) -> Callable[..., Tensor]:
    """Transformer Engine's attention of a row, as its layers call it."""
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(
        sizes.heads,
        sizes.width,
        num_gqa_groups=sizes.groups,
        attention_dropout=0.0,
        qkv_format="thd",
    )
    return partial(module, **te_arguments(row, "padding_causal"))


def te_arguments(row: PackedSeqParams, mask: str) -> dict[str, Any]:
    """A row as arguments of Transformer Engine's attention. Later releases of Megatron-Core keep
    more in a row than these."""
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    given = {name: getattr(row, name) for name in (*names, "max_seqlen_q", "max_seqlen_kv")}
    return {**given, "qkv_format": row.qkv_format, "attn_mask_type": mask}


def varlen_attention(row: PackedSeqParams, sizes: Sizes) -> Callable[..., Tensor]:
    """torch's varlen attention of a row."""
    view = row_view(row)
    ends = (view.cu_seqlens_S1, view.cu_seqlens_S1, view.max_seqlen, view.max_seqlen)
    return lambda q, k, v: varlen_causal_attention(q, k, v, *ends, sizes.width**-0.5)


def slices(length: int, ranks: int, sizes: Sizes) -> dict[str, float]:
    """The share of one of several ranks in a row of equal samples, with all keys at hand."""
    count = max(1, sizes.row_tokens // length)
    spans = [length] * count
    mine = len(slice_positions(spans, ranks, 0))
    paths = moved(key_paths(spans, (), cp=ranks, cp_rank=0), sizes.device)
    inputs = sizes.attention_inputs(mine, len(paths.order_K))
    ends = (paths.query_ends, paths.key_ends, max(paths.num_queries), max(paths.num_keys))

    def attend(*inputs: Tensor) -> Tensor:
        return varlen_causal_attention(*inputs, *ends, sizes.width**-0.5)

    found = both_ways(attend, inputs, sizes.device)
    # In zigzag slices each rank has an equal share of a sample's scores.
    return {"samples": count, "flops": sizes.attention_flops(length, count) / ranks, **found}


def matrix(tokens: int, sizes: Sizes) -> dict[str, float]:
    """A product with an MLP's matrix."""
    row, weight = sizes.drawn([(tokens, sizes.hidden), (sizes.ffn, sizes.hidden)])
    found = both_ways(torch.nn.functional.linear, [row, weight], sizes.device)
    return {"flops": 2 * tokens * sizes.hidden * sizes.ffn, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("seconds", type=float, help="no line begins later")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    launch.quiet_known_warnings()
    sizes = TINY if options.rehearse else Sizes()
    lengths = [length for length in LENGTHS if length <= sizes.longest]
    lines: list[tuple[str, int, Callable[[], dict[str, float]]]] = [
        ("matrix", tokens, partial(matrix, tokens, sizes))
        for tokens in TOKENS
        if tokens <= sizes.longest
    ]
    kernels: list[Literal["te", "varlen"]] = ["te", "varlen"]
    for kernel in kernels:
        if obstacle(kernel) is None:
            lines += [(kernel, n, partial(whole_samples, kernel, n, sizes)) for n in lengths]
    if obstacle("varlen") is None:
        for ranks in RANKS:
            name = f"varlen, {ranks} ranks"
            lines += [(name, n, partial(slices, n, ranks, sizes)) for n in lengths]
    found: list[dict[str, Any]] = []
    for what, size, run in lines:
        if time.monotonic() > end:
            break
        try:
            found.append({"what": what, "size": size, **run()})
        except Exception as error:  # recorded: the other lines go on
            logger.exception("%s of %d failed", what, size)
            found.append({"what": what, "size": size, "error": f"{type(error).__name__}: {error}"})
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
