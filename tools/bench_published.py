"""Holds the cost model from sizes against measurements that others have published.

    python tools/bench_published.py FOLDER

FOLDER is `distca/profiling/data` of hao-ai-lab/DistCA (commit 2afd219): attention of one document
on an H100 by its length and number of context-parallel ranks, 64 heads of 128 channels, forward,
and NCCL's collectives on 2, 4 and 8 of them. Prints two tables:

- errors of what a layer takes for the document, by the squared tokens alone with 5 % more on
  several ranks, and by the model. The speed of squared tokens is that of the longest document on
  one rank, so that the form is compared, not the assumed speed. Matrices are those of
  Qwen3-235B-A22B at the assumed speed; exchanges are in neither side.
- latency and bandwidth of the collectives, from a line through their seconds.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack.cost.assumed import ATTENTION_TOKENS, GpuSpeed, cost_from_sizes
from megapack.cost.model import CostModel
from megapack.cost.sizes import ModelSizes
from megapack.layout import Layout

# Qwen3-235B-A22B, one layer, without a vocabulary that would count.
SIZES = ModelSizes(
    num_layers=1,
    hidden_size=4096,
    ffn_hidden_size=1536,
    num_attention_heads=64,
    num_query_groups=4,
    kv_channels=128,
    vocab_size=1,
    num_experts=128,
    moe_top_k=8,
)
FLAT_OVERHEAD = 0.05
LEAST_TOKENS = 512


def attention_seconds(folder: Path) -> dict[tuple[int, int], float]:
    """(tokens, ranks) -> seconds of a document on one of the ranks, without tensor parallelism."""
    with (folder / "compute-attn-H100.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["tp"] == "1"]
    return {(int(r["L"]), int(r["cp"])): float(r["duration_per_doc"]) / 1e3 for r in rows}


def collective_lines(folder: Path) -> dict[tuple[str, int], tuple[float, float]]:
    """(collective, ranks) -> seconds of latency, and GB/s that a rank receives."""
    with (folder / "network-prof-nccl" / "nccl_perf.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {}
    for op, num_ranks in dict.fromkeys((row["op"], int(row["ngpu"])) for row in rows):
        own = [r for r in rows if (r["op"], int(r["ngpu"])) == (op, num_ranks)]
        received = np.array([float(r["size_bytes"]) for r in own]) * (num_ranks - 1) / num_ranks
        seconds = np.array([float(r["t_us_out"]) for r in own]) / 1e6
        # Relative errors, or the largest messages alone would count.
        columns = np.stack([np.ones_like(seconds), received]).T / seconds[:, None]
        latency, per_byte = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
        found[op, num_ranks] = (float(latency), 1e-9 / float(per_byte))
    return found


def without_exchange() -> CostModel:
    """The model from sizes of a layer, with the kernels of attention and without exchanges."""
    never = GpuSpeed(peak_tflops=989.4, layer_overhead_us=0.0, cp_gbs=1e12, cp_latency_us=0.0)
    return cost_from_sizes(SIZES, Layout(), never, recompute="none", mean_length=4096)


def print_attention(measured: dict[tuple[int, int], float]) -> None:
    """Errors of a layer's seconds, by length and ranks."""
    cost = without_exchange()
    keys = SIZES.layer_attention_tokens(ATTENTION_TOKENS)
    flops = SIZES.layer_flops_per_token()
    # What tokens cost without the part that short samples take in attention's kernels.
    matrices = cost.per_token * flops / (flops + keys)
    longest = max(tokens for tokens, _ in measured)
    kernels = cost.per_token - matrices
    # Seconds of a squared token, and of what is proportional to it, on the measured GPU.
    faster = measured[longest, 1] / (kernels * longest + cost.per_token_sq * longest**2)
    per_square = measured[longest, 1] / longest**2
    ranks = sorted({num_ranks for _, num_ranks in measured})
    print("| tokens |" + "".join(f" {n} ranks, us | squares | model |" for n in ranks))
    print("|---|" + "---|---|---|" * len(ranks))
    for tokens in sorted({tokens for tokens, _ in measured if tokens >= LEAST_TOKENS}):
        cells = []
        for num_ranks in ranks:
            seconds = measured[tokens, num_ranks]
            rest = matrices * tokens / num_ranks
            overhead = FLAT_OVERHEAD if num_ranks > 1 else 0.0
            squares = (1 + overhead) * per_square * tokens**2 / num_ranks
            more = cost.cp_overhead * cost.per_token * (num_ranks - 1)
            model = faster * tokens / num_ranks * (kernels + more + cost.per_token_sq * tokens)
            errors = ((guess - seconds) / (seconds + rest) for guess in (squares, model))
            cells += [f"{1e6 * seconds:,.0f}", *(f"{100 * error:+.0f}%" for error in errors)]
        print(f"| {tokens:,} | " + " | ".join(cells) + " |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    if not (folder / "compute-attn-H100.csv").is_file():
        parser.error(f"{folder} has no compute-attn-H100.csv; give distca/profiling/data")
    print_attention(attention_seconds(folder))
    print("\n| collective | ranks | latency, us | GB/s received |\n|---|---|---|---|")
    for (op, num_ranks), (latency, speed) in collective_lines(folder).items():
        print(f"| {op} | {num_ranks} | {1e6 * latency:.0f} | {speed:.0f} |")


if __name__ == "__main__":
    main()
