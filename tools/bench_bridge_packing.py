#!/usr/bin/env python
"""Compares Megatron-Bridge's offline packer with megapack's on a file of lengths.

    python tools/bench_bridge_packing.py lengths.csv --pack-size 16384 --global-batch-size 64 \
        --layout dp=4,pp=4,vpp=2

The file has the columns prompt_len and response_len; longer samples are cut to the pack size.
Prints packs, padding, the packer's seconds, and the simulated seconds of an epoch's steps over
those of steps without padding, bubble or imbalance: with Bridge's packs, with megapack's, and with
planned steps on Bridge's packs.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import CostModel, Layout, build_dp_schedule, simulate
from megapack.hosts import megatron_bridge
from megapack.plan.plan import MicroBatch, StepPlan
from tests.hosts.steps.job import parse_layout
from tests.hosts.steps.megatron_bridge import import_bridge

Packs = list[list[int]]


def main() -> None:
    """Print a line per way."""
    args = _arguments()
    import_bridge()
    from megatron.bridge.data.packing import algorithms

    lengths = _read(args.file, args.pack_size)
    cost = CostModel(per_token=1.0, per_token_sq=args.square)
    batch = args.global_batch_size
    megatron_bridge.first_fit_shuffle([1, 2], 4)  # compiles
    own = _timed("Bridge", algorithms.first_fit_shuffle, lengths, args.pack_size)
    _simulate("  its steps", own, args, cost)
    _simulate("  planned steps on its packs", own, args, cost, planned=True)
    megatron_bridge.configure(cost=cost)
    packs = _timed("megapack", megatron_bridge.first_fit_shuffle, lengths, args.pack_size)
    _simulate("  Bridge's steps", packs, args, cost)
    megatron_bridge.configure(global_batch_size=batch)
    name = f"megapack, also global_batch_size={batch}"
    packs = _timed(name, megatron_bridge.first_fit_shuffle, lengths, args.pack_size)
    _simulate("  Bridge's steps", packs, args, cost)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--pack-size", type=int, required=True)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--layout", type=parse_layout, default=Layout(dp=4, pp=4, vpp=2))
    parser.add_argument("--square", type=float, default=1 / 49152, help="tokens per squared token")
    args = parser.parse_args()
    if not args.file.is_file():
        parser.error(f"there is no file {args.file}")
    return args


def _read(file: Path, longest: int) -> list[int]:
    with file.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    totals = [int(row["prompt_len"]) + int(row["response_len"]) for row in rows]
    return [min(total, longest) for total in totals]


def _timed(
    name: str, pack: Callable[[list[int], int], Packs], lengths: list[int], pack_size: int
) -> Packs:
    np.random.seed(0)
    start = time.perf_counter()
    packs = pack(list(lengths), pack_size)
    seconds = time.perf_counter() - start
    padding = 1 - sum(lengths) / (len(packs) * pack_size)
    print(f"{name}: {len(packs)} packs, {padding:.2%} padding, {seconds:.2f} s")
    return packs


def _simulate(
    name: str, packs: Packs, args: argparse.Namespace, cost: CostModel, *, planned: bool = False
) -> None:
    batch = args.global_batch_size
    starts = range(0, len(packs) - batch + 1, batch)
    steps = [packs[start : start + batch] for start in starts]
    run = _planned_seconds if planned else _packed_seconds
    spent = sum(run(step, args.layout, args.pack_size, cost) for step in steps)
    work = sum(cost.per_token * n + cost.per_token_sq * n * n for s in steps for p in s for n in p)
    ideal = (1 + cost.backward_ratio) * work / (args.layout.dp * args.layout.pp)
    left_out = len(packs) - batch * len(steps)
    print(f"{name}: {spent / ideal:.4f} of the ideal, {left_out} packs left out of each epoch")


def _packed_seconds(step: Packs, layout: Layout, pack_size: int, cost: CostModel) -> float:
    """Bridge's step: pack m * dp + r is micro-batch m of rank r, and padded to the pack size."""
    ranks = tuple(
        tuple(_row(pack, pack_size) for pack in step[rank :: layout.dp])
        for rank in range(layout.dp)
    )
    group = layout.microbatch_group_size or layout.pp
    plan = StepPlan(
        ranks=ranks,
        num_microbatches=len(ranks[0]),
        group_size=group if layout.vpp > 1 else None,
        kept_rollouts=(),
        dropped_rollouts=(),
    )
    return simulate(plan, layout=layout, cost=cost).makespan


def _row(pack: Sequence[int], pack_size: int) -> MicroBatch:
    # The row's padding is one more sample.
    parts = [*pack, pack_size - sum(pack)]
    return MicroBatch(
        samples=tuple(range(len(pack))),
        row_tokens=pack_size,
        tokens=sum(pack),
        tokens_sq=sum(n * n for n in parts),
        padded_tokens=pack_size,
    )


def _planned_seconds(step: Packs, layout: Layout, pack_size: int, cost: CostModel) -> float:
    plan = build_dp_schedule(
        [length for pack in step for length in pack],
        layout=layout,
        max_tokens_per_gpu=pack_size,
        cost=cost,
    )
    return simulate(plan.steps[0], layout=layout, cost=cost).makespan


if __name__ == "__main__":
    main()
