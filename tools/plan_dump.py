"""Dump the plans of a fixed grid of cases, and compare two dumps.

    python tools/plan_dump.py write before.jsonl      # about 1,500 plans, some minutes
    python tools/plan_dump.py write after.jsonl
    python tools/plan_dump.py compare before.jsonl after.jsonl

For a change of the planner that should keep plans as they are: equal digests mean equal JSON, byte
by byte. Where plans differ, the comparison prints the ratio of the simulated seconds per group of
cases (geometric mean and the worst cell), and of the CPU time of planning.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import (
    CostModel,
    Layout,
    MegapackError,
    Policy,
    build_dp_schedule,
    check_plan,
)
from megapack.pipeline.simulator import simulate_planned
from megapack.prefixes import SharedPrefixes

COST = CostModel(fixed=2e-5, per_token=1e-6, per_token_sq=1e-6 / 12288, cp_overhead=0.05)
BUDGET = 8192
LAYOUTS = {
    "dp4": Layout(dp=4),
    "dp2 pp4": Layout(dp=2, pp=4),
    "dp4 pp2 vpp2": Layout(dp=4, pp=2, vpp=2),
    "dp1 pp4": Layout(dp=1, pp=4),
    "dp2 pp2 vpp2 cp2": Layout(dp=2, pp=2, vpp=2, cp=2),
    "dp4 pp2 ep4": Layout(dp=4, pp=2, ep=4),
}
FEATURES = {
    "plain": Policy(),
    "construction": Policy(search=0),
    "uniform": Policy(row_shape="uniform"),
    "drop": Policy(unreachable="drop"),
    "live cap": Policy(max_live_tokens_per_gpu=28672),
    "no prefixes": Policy(share_prefixes="off"),
    "dynamic": Policy(context_parallel="dynamic"),
    "pieces": Policy(split_samples="auto"),
    "split backward": Policy(backward="split"),
    "pieces, split backward": Policy(split_samples="auto", backward="split"),
    "all": Policy(split_samples="auto", backward="split", context_parallel="dynamic"),
}
"""Policies of the grid; "all" has every row feature."""
SIZES = (24, 96, 384)


@dataclass(frozen=True)
class Case:
    """One call of `build_dp_schedule`."""

    name: str
    group: str
    """Cases of one policy are compared as a group."""
    lengths: list[int]
    arguments: dict[str, Any]


def cases() -> Iterator[Case]:
    """The grid: lengths x layouts x policies, some with prefixes, colocated sets and rollouts."""
    data = {f"{name} {size}": make(size) for name, make in LENGTHS.items() for size in SIZES}
    for (kind, lengths), layout, policy in product(data.items(), LAYOUTS, FEATURES):
        settings: dict[str, Any] = {
            "cost": COST,
            "max_tokens_per_gpu": BUDGET // LAYOUTS[layout].cp,
        }
        if kind.startswith("families"):
            settings["prefixes"] = _prefixes(lengths)
            # Half of the families train in rollouts of four samples.
            settings["rollout_ids"] = [i // 4 for i in range(len(lengths))]
        if kind.startswith("pairs"):
            settings["colocate_ids"] = [i // 2 for i in range(len(lengths))]
        name = f"{kind}, {layout}, {policy}"
        arguments = {"layout": LAYOUTS[layout], "policy": FEATURES[policy], **settings}
        yield Case(name, policy, lengths, arguments)
    for (kind, lengths), layout in product(data.items(), LAYOUTS):
        base = {"layout": LAYOUTS[layout], "cost": COST}
        yield Case(f"{kind}, {layout}, counts", "counts", lengths, {**base, "micro_batch_size": 3})
        tokens = {**base, "max_tokens_per_gpu": BUDGET, "cost": None}
        yield Case(f"{kind}, {layout}, no cost", "no cost", lengths, tokens)
        forward = {**base, "max_tokens_per_gpu": BUDGET, "forward_only": True}
        yield Case(f"{kind}, {layout}, forward", "forward", lengths, forward)
        steps = {**base, "max_tokens_per_gpu": BUDGET, "num_steps": 2}
        policy = Policy(step_split="balanced", search=256)
        yield Case(f"{kind}, {layout}, steps", "steps", lengths, {**steps, "policy": policy})


def _tail(size: int) -> list[int]:
    """Many short samples and a long tail, none over the budget."""
    random = np.random.default_rng(size)
    return np.clip(random.lognormal(6.6, 1.0, size), 16, BUDGET - 64).astype(int).tolist()


def _over(size: int) -> list[int]:
    """A few samples over the budget."""
    lengths = _tail(size)
    lengths[::11] = [BUDGET + 512 * k for k in range(1, len(lengths[::11]) + 1)]
    return [min(n, 2 * BUDGET - 128) for n in lengths]


def _even(size: int) -> list[int]:
    """Samples of about one length."""
    return [900 + 13 * (i * i % 17) for i in range(size)]


def _families(size: int) -> list[int]:
    """Eight answers to each prompt."""
    random = np.random.default_rng(size + 1)
    return (1024 + random.lognormal(6.2, 0.9, size).clip(8, 4096)).astype(int).tolist()


def _pairs(size: int) -> list[int]:
    """Pairs of a preference loss."""
    return [min(n, BUDGET // 2 - 64) for n in _tail(size)]


LENGTHS = {
    "tail": _tail,
    "over": _over,
    "even": _even,
    "families": _families,
    "pairs": _pairs,
}


def _prefixes(lengths: list[int]) -> SharedPrefixes:
    """Families of eight share 1,000 tokens; every second pair in them 1,016."""
    size = len(lengths)
    common = [0 if i % 8 == 0 else 1000 if i % 4 != 1 else 1016 for i in range(size)]
    return SharedPrefixes(tuple(range(size)), tuple(common), 1)


def dump(case: Case) -> dict[str, Any]:
    """What is compared of a case's plan: digest, seconds and CPU time; or its error."""
    start = time.process_time()
    try:
        plan = build_dp_schedule(case.lengths, **case.arguments)
    except MegapackError as error:
        return {"name": case.name, "group": case.group, "error": str(error)}
    used = time.process_time() - start
    check_plan(plan, case.lengths)
    cost = case.arguments["cost"]
    seconds = math.fsum(simulate_planned(plan, step, cost).makespan for step in plan.steps)
    return {
        "name": case.name,
        "group": case.group,
        "digest": plan.digest(),
        "seconds": seconds,
        "cpu_ms": 1e3 * used,
        "plan": plan.to_json(),
    }


def compare(before: Path, after: Path) -> bool:
    """Print the differences of two dumps; returns whether all plans and errors are equal."""
    old, new = (
        {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}
        for path in (before, after)
    )
    groups: dict[str, list[tuple[float, str]]] = defaultdict(list)
    cpu: dict[str, list[tuple[float, float]]] = defaultdict(list)
    equal = True
    for name in [name for name in old if name in new]:
        a, b = old[name], new[name]
        if a.get("error") != b.get("error"):
            equal = False
            print(f"{name}: {a.get('error', 'a plan')!r} -> {b.get('error', 'a plan')!r}")
        if "digest" in a and "digest" in b:
            cpu[a["group"]].append((a["cpu_ms"], b["cpu_ms"]))
            if a["digest"] != b["digest"]:
                equal = False
                groups[a["group"]].append((b["seconds"] / a["seconds"], name))
    for group, times in cpu.items():
        # The median: the first plans of a dump may compile.
        ratio = statistics.median(b / a for a, b in times)
        differ = groups[group]
        text = f"{group}: {len(times)} plans, CPU time x {ratio:.3f}, {len(differ)} differ"
        if differ:
            mean = math.exp(math.fsum(math.log(r) for r, _ in differ) / len(differ))
            text += f"; seconds x {mean:.5f}, worst x {max(differ)[0]:.5f} ({max(differ)[1]})"
        print(text)
    missing = len(set(old) ^ set(new))
    print(f"{len(old)} and {len(new)} cases, {missing} in one dump only")
    return equal and not missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="plan all cases")
    write.add_argument("file", type=Path)
    write.add_argument("--only", default="", help="plan cases whose name contains this text")
    comparison = commands.add_parser("compare", help="compare two dumps")
    comparison.add_argument("before", type=Path)
    comparison.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        return 0 if compare(args.before, args.after) else 1
    # Samples over the budget are meant.
    logging.disable(logging.WARNING)
    with args.file.open("w", encoding="utf-8") as file:
        for case in cases():
            if args.only in case.name:
                file.write(json.dumps(dump(case)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
