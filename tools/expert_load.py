"""Measure what a planner would gain from knowing which experts each sample chooses.

    python tools/expert_load.py               # trains toys, writes docs/expert_load.md
    python tools/expert_load.py --only-drawn  # prints the table of drawn preferences

Trains toy mixtures of experts over gloo, records the routes of their samples, and plans steps of
these samples. Then exchanges samples between the plan's rows, once knowing only tokens and once
also experts, and compares the seconds of both with the real routes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megapack import Layout, build_dp_schedule  # noqa: E402
from tools.expert_loading.loads import (  # noqa: E402
    NUM_EXCHANGES,
    Floats,
    Ints,
    LockstepTime,
    assignment,
    believed_counts,
    concentration,
    drawn_counts,
    rank_loads,
    search,
    waits,
)
from tools.pages.marks import put_between  # noqa: E402

PAGE = ROOT / "docs" / "expert_load.md"
MARKS = ("<!-- measured -->", "<!-- end -->")
CONFIG = "configs/moe_replay_tiny_dp2_ep2_cpu.yaml"
# Part of a layer's seconds that experts take. In a layer of Qwen3-30B-A3B a token of a 1,000-token
# sample has 75 million operations in its 8 experts, 38 in projections and 8 in attention: 62 %.
SHARE = 0.6
# Rows per DP rank that plans have room for; real steps have 4 to 16.
ROWS = 8
# Samples of a recorded step, of the last 4 batches of 64.
RECORDED_BATCHES = 4
# Concentrations of drawn preferences; at 0.1 a token's 2 of 16 experts are nearly a sample's own.
DRAWN = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SEEDS = (0, 1)
# What searches know, see `believed_counts`.
KNOWLEDGE = ("nothing", "step", "group", "routes")


@dataclass(frozen=True)
class Toy:
    """A model to train and record."""

    name: str
    world: int
    overrides: tuple[str, ...]
    has_text: bool = True


_TEXT = (
    "objective.kind=sft",
    "objective.advantage_norm=none",
    "train.routing_replay=none",
    "model.num_layers=4",
    "model.num_experts=16",
    "plan.global_batch_size=null",
)
_BALANCED = ("optim.lr=2e-3", "model.moe_balance_loss_coef=0.01")
_BIAS = ("optim.lr=2e-3", "model.moe_score_function=sigmoid", "model.moe_bias_update_rate=0.01")
TOYS = (
    Toy("shipped config, 8 steps on counting", 2, (), has_text=False),
    Toy("text, untrained", 2, (*_TEXT, "optim.lr=1e-9")),
    Toy("text, 60 steps", 2, (*_TEXT, "optim.lr=2e-3")),
    Toy("text, 60 steps, balance loss", 2, (*_TEXT, *_BALANCED)),
    Toy("the same on dp4 ep4", 4, (*_TEXT, *_BALANCED, "layout.dp=4", "layout.ep=4")),
    Toy(
        "text, 60 steps, balance loss 1",
        2,
        (*_TEXT, *_BALANCED[:1], "model.moe_balance_loss_coef=1"),
    ),
    Toy("text, 60 steps, expert bias", 2, (*_TEXT, *_BIAS)),
)
NUM_STEPS = 60
BATCH = 64


@dataclass(frozen=True)
class Recorded:
    """Samples of one step: tokens [n], prompt groups [n], counts [n, layers, experts]."""

    tokens: Ints
    groups: Ints
    counts: Ints


def write_text(path: Path, num_groups: int, group_size: int) -> None:
    """Pieces of this repository's files as samples; a group's are of one file.

    Lengths are lognormal like those of responses, 150 tokens in the middle, 800 at most.
    """
    rng = np.random.default_rng(0)
    texts = []
    for pattern in ("megapack/**/*.py", "docs/**/*.md", "megapack/job/view/web/*", "tools/**/*.sh"):
        found = [p.read_bytes() for p in sorted(ROOT.glob(pattern)) if p.stat().st_size > 2000]
        texts.append(found)
    with open(path, "w", encoding="utf-8") as file:
        for group in range(num_groups):
            kind = texts[group % len(texts)]
            text = kind[rng.integers(len(kind))]
            for _ in range(group_size):
                length = int(np.clip(rng.lognormal(5.0, 0.8), 16, 800))
                start = int(rng.integers(max(1, len(text) - length)))
                piece = list(text[start : start + length])
                row = {"group": group, "prompt_ids": piece[:4], "response_ids": piece[4:]}
                file.write(json.dumps(row) + "\n")


def record(toy: Toy, folder: Path) -> Recorded:
    """Train a toy and read what it recorded."""
    out = folder / "recorded.npz"
    overrides = [*toy.overrides, f"runs_dir={folder / 'runs'}"]
    if toy.has_text:
        write_text(folder / "text.jsonl", NUM_STEPS * BATCH // 4, 4)
        overrides.append(f"data.path={folder / 'text.jsonl'}")
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(toy.world), "-m", "tools.expert_loading.record"),
            *(str(out), str(RECORDED_BATCHES), CONFIG, *overrides),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    with np.load(out) as found:
        return Recorded(found["tokens"], found["groups"], found["counts"])


@dataclass(frozen=True)
class Measured:
    """A step's numbers under one layout."""

    layout: Layout
    num_microbatches: int
    plan_wait: float
    bound_wait: float
    gains: dict[str, float]
    """Seconds of the search that knows only tokens over those of one that knows more, minus 1."""
    limit: float
    """The same for a plan of perfectly filled rows that waits no longer than the bound."""


def measure(
    step: Recorded,
    layout: Layout,
    *,
    knowledge: tuple[str, ...] = KNOWLEDGE,
    num_exchanges: int = NUM_EXCHANGES,
) -> Measured:
    """Plan the samples for a layout, then search with and without knowledge of experts."""
    room = step.tokens.sum() / layout.dp / ROWS
    capacity = int(max(step.tokens.max(), 1.1 * room))
    plan = build_dp_schedule(step.tokens, layout=layout, max_tokens_per_gpu=capacity)
    where = assignment(plan, capacity)
    loads = rank_loads(step.counts, layout.ep)
    time = LockstepTime(step.tokens, loads, SHARE, where)
    found = waits(loads, where)
    seconds: dict[str, float] = {}
    for knows in knowledge:
        believed: Floats = rank_loads(believed_counts(step.counts, step.groups, knows), layout.ep)
        ends = [
            search(step.tokens, believed, SHARE, where, seed=seed, num_exchanges=num_exchanges)
            for seed in SEEDS
        ]
        seconds[knows] = sum(time.step(*end) for end in ends) / len(ends)
    blind = seconds.pop("nothing")
    return Measured(
        layout=layout,
        num_microbatches=plan.steps[0].num_microbatches,
        plan_wait=found.plan,
        bound_wait=found.bound,
        gains={knows: blind / value - 1 for knows, value in seconds.items()},
        limit=blind / (1 + SHARE * found.bound) - 1,
    )


def layouts(num_experts: int) -> Iterator[Layout]:
    """EP groups of 2 to 8 ranks, and two groups of 4."""
    for dp, ep in ((2, 2), (4, 4), (8, 4), (8, 8)):
        if num_experts % ep == 0 and num_experts >= ep:
            yield Layout(dp=dp, ep=ep)


HEAD = "layout | M | experts wait | at least | gain: routes | group | step | limit |\n"
RULE = "|---|---|---|---|---|---|---|---|---|\n"


def row(name: str, m: Measured) -> str:
    """One line of a table."""
    gains = " | ".join(f"{100 * m.gains[knows]:+.2f} %" for knows in ("routes", "group", "step"))
    return (
        f"| {name} | dp{m.layout.dp} ep{m.layout.ep} | {m.num_microbatches} | "
        f"{100 * m.plan_wait:.1f} % | {100 * m.bound_wait:.1f} % | {gains} | "
        f"{100 * m.limit:.2f} % |\n"
    )


def recorded_table() -> str:
    """The table of trained toys."""
    lines = f"| model, c | {HEAD}{RULE}"
    for toy in TOYS:
        with tempfile.TemporaryDirectory() as folder:
            step = record(toy, Path(folder))
        name = f"{toy.name}, {concentration(step.counts):.2g}"
        for layout in layouts(step.counts.shape[2]):
            lines += row(name, measure(step, layout))
            print(lines.splitlines()[-1], flush=True)
    return lines


def drawn_table() -> str:
    """The table of drawn preferences: the steps' seconds at dp8 ep8, in percent."""
    rng = np.random.default_rng(0)
    short = np.clip(rng.lognormal(5.0, 0.8, RECORDED_BATCHES * BATCH), 16, 800).astype(np.int64)
    lines = "| model | c | experts wait | at least | gain: routes | limit |\n"
    lines += "|---|---|---|---|---|---|\n"
    n = short.size
    small = (short, 4, 16, 2)
    large = (16 * short, 48, 128, 8)
    for name, (tokens, *sizes), num_kinds in (
        ("4 layers, 2 of 16 experts, 200 tokens", small, n),
        ("48 layers, 8 of 128 experts, 3,300 tokens", large, n),
        ("the same, samples of 4 kinds", large, 4),
    ):
        for c in DRAWN:
            counts = drawn_counts(tokens, *sizes, c, num_kinds=num_kinds, seed=1)
            step = Recorded(tokens, np.arange(tokens.size), counts)
            m = measure(step, Layout(dp=8, ep=8), knowledge=("nothing", "routes"))
            lines += (
                f"| {name} | {c:g} | {100 * m.plan_wait:.1f} % | {100 * m.bound_wait:.1f} % | "
                f"{100 * m.gains['routes']:+.2f} % | {100 * m.limit:.2f} % |\n"
            )
            print(lines.splitlines()[-1], flush=True)
    return lines


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only-drawn", action="store_true")
    arguments = parser.parse_args()
    drawn = drawn_table()
    if arguments.only_drawn:
        return
    text = (
        f"Recorded routes, with {os.cpu_count()} cores, Python {platform.python_version()}:\n\n"
        f"{recorded_table()}\n"
        f"Drawn preferences, {RECORDED_BATCHES * BATCH} samples, dp8 ep8:\n\n{drawn}"
    )
    page = put_between(PAGE.read_text(encoding="utf-8"), MARKS, f"\n{text}")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
