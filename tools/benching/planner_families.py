"""Steps whose samples share prefixes, generated from a seed, and those of the traces with groups.

A sample is given by what a plan needs: its length and the tokens that it has in common with the
sample before it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megapack import (
    CostModel,
    Layout,
    Plan,
    Policy,
    SharedPrefixes,
    build_dp_schedule,
    check_plan,
)
from megapack.pipeline.simulator import simulate_planned

SEED = 0
# Backward and split samples of the policies that `pieces_table` compares.
_POLICIES = (("joint", "off"), ("joint", "auto"), ("split", "off"), ("split", "auto"))


@dataclass(frozen=True)
class FamilyStep:
    """The samples of one step, prompt group after prompt group."""

    name: str
    lengths: np.ndarray
    """int64 [n], tokens of each sample."""
    prefixes: SharedPrefixes
    budget: int
    """Tokens per row."""


def generated_steps(num_samples: int) -> list[FamilyStep]:
    """The generated steps of the table, of about this many samples each."""
    return [
        _groups("math G=8", num_samples, 8, (100, 500), (500, 8000), 32768),
        _groups("math G=16", num_samples, 16, (100, 500), (500, 8000), 32768),
        _groups("agentic G=8", num_samples, 8, (2000, 16000), (200, 2000), 32768),
        _groups("agentic G=16", num_samples, 16, (2000, 16000), (200, 2000), 32768),
        _groups("agentic long G=8", num_samples, 8, (2000, 16000), (1000, 8000), 65536),
        _trees("trees G=8", num_samples, 8, 32768),
        _trees("trees G=16", num_samples, 16, 32768),
        _turns("turns G=8", num_samples, 8, 32768),
        _turns("turns G=16", num_samples, 16, 32768),
    ]


def large_steps(num_samples: int) -> list[FamilyStep]:
    """Steps with families over the budget of a row."""
    return [
        _groups("documents G=8", num_samples, 8, (16000, 28000), (500, 4000), 32768),
        _groups("documents G=16", num_samples, 16, (16000, 28000), (500, 4000), 32768),
        _groups(
            "documents, long answers G=16", num_samples, 16, (8000, 24000), (2000, 8000), 32768
        ),
        _groups("agentic G=16, half a budget", num_samples, 16, (2000, 16000), (200, 2000), 16384),
    ]


def trace_steps(folder: Path, num_samples: int) -> list[FamilyStep]:
    """The traces of answers to the same prompts: 4 and 16 per prompt."""
    files = [
        ("math500 G=4", "skythought_math500_g4.csv", 4, 36864),
        ("aime24 G=16", "skythought_aime24_longcot_g16.csv", 16, 51200),
    ]
    steps = []
    for name, file, size, budget in files:
        if not (folder / file).is_file():
            continue
        columns = np.loadtxt(folder / file, delimiter=",", skiprows=1, dtype=np.int64)
        prompts = columns[: num_samples // size * size, 0]
        answers = columns[: prompts.size, 1]
        groups = np.arange(prompts.size) // size
        prefixes = SharedPrefixes.from_groups(groups.tolist(), prompts.tolist())
        steps.append(FamilyStep(name, prompts + answers, prefixes, budget))
    return steps


def _log_uniform(rng: np.random.Generator, ends: tuple[int, int], size: int) -> np.ndarray:
    return np.exp(rng.uniform(*np.log(ends), size)).astype(np.int64)


def _groups(
    name: str,
    num_samples: int,
    size: int,
    prompt: tuple[int, int],
    answer: tuple[int, int],
    budget: int,
) -> FamilyStep:
    """Groups of `size` answers to one prompt; both lengths log-uniform within their ends."""
    rng = np.random.default_rng(SEED)
    num_groups = num_samples // size
    prompts = np.repeat(_log_uniform(rng, prompt, num_groups), size)
    answers = _log_uniform(rng, answer, num_groups * size)
    groups = np.repeat(np.arange(num_groups), size)
    prefixes = SharedPrefixes.from_groups(groups.tolist(), prompts.tolist())
    return FamilyStep(name, prompts + answers, prefixes, budget)


def _trees(name: str, num_samples: int, size: int, budget: int) -> FamilyStep:
    """Multi-turn rollouts that branch below one prompt.

    A prompt of 500 to 4,000 tokens, then turns of 300 to 3,000 tokens. Each sample but the first of
    its tree leaves the sample before it after 0 to 3 of that one's turns and has 1 to 4 own ones.
    """
    rng = np.random.default_rng(SEED)
    lengths = []
    common = []
    for _ in range(num_samples // size):
        # Where the turns of the last sample end.
        ends = [int(_log_uniform(rng, (500, 4000), 1)[0])]
        for k in range(size):
            kept = min(int(rng.integers(0, 4)), len(ends) - 2) if k else 0
            ends = ends[: 1 + kept]
            common.append(ends[-1] if k else 0)
            for turn in _log_uniform(rng, (300, 3000), int(rng.integers(1, 5))).tolist():
                ends.append(ends[-1] + turn)
            lengths.append(ends[-1])
    order = tuple(range(len(lengths)))
    return FamilyStep(name, np.array(lengths), SharedPrefixes(order, tuple(common)), budget)


def _turns(name: str, num_samples: int, size: int, budget: int) -> FamilyStep:
    """Turns of agents, each of which begins with the one before it.

    Tasks begin with the same 400 tokens of a system prompt, and go on with 200 to 3,000. A rollout
    has 1 to 8 turns, of a response of 50 to 1,000 tokens and 50 to 2,000 of a tool after it. Two of
    five are compacted once: from one of their turns on they begin with the system prompt and a
    summary of 400 tokens.
    """
    rng = np.random.default_rng(SEED)
    system, summary = 400, 400
    lengths: list[int] = []
    common: list[int] = []
    while len(lengths) < num_samples:
        prompt = system + int(_log_uniform(rng, (200, 3000), 1)[0])
        begun: list[tuple[int, list[int]]] = []
        compacted: list[tuple[int, list[int]]] = []
        for _ in range(size):
            count = int(rng.integers(1, 9))
            cut = int(rng.integers(1, count)) if count > 1 and rng.random() < 0.4 else count
            for chains, start, shared, turns in [
                (begun, prompt, prompt if begun else system, cut),
                (compacted, system + summary, system, count - cut),
            ]:
                written = _log_uniform(rng, (50, 1000), turns)
                read = np.cumsum(_log_uniform(rng, (50, 2000), turns))
                if turns:
                    ends = start + np.cumsum(written) + np.append(0, read[:-1])
                    chains.append((shared, ends.tolist()))
        for shared, ends in begun + compacted:
            common += [shared, *ends[:-1]]
            lengths += ends
    common[0] = 0
    order = tuple(range(len(lengths)))
    return FamilyStep(name, np.array(lengths), SharedPrefixes(order, tuple(common)), budget)


@dataclass(frozen=True)
class SharedResult:
    """A step planned without prefixes and with them."""

    seconds: tuple[float, float]
    """Simulated."""
    counts: tuple[int, int]
    """M."""
    milliseconds: tuple[float, float]
    """CPU time of planning, which another process on the machine does not change."""
    tokens: float
    """Real tokens over those that the rows hold."""

    @property
    def speedup(self) -> float:
        return self.seconds[0] / self.seconds[1]


def compare(
    step: FamilyStep, layout: Layout, cost: CostModel, policy: Policy | None = None
) -> SharedResult:
    """Plan a step both ways.

    Raises:
        AssertionError: the plan with prefixes is slower, or breaks an invariant.
    """
    seconds = []
    plans: list[Plan] = []
    milliseconds = []
    for prefixes in (None, step.prefixes):
        start = time.process_time()
        plan = build_dp_schedule(
            step.lengths,
            layout=layout,
            max_tokens_per_gpu=step.budget,
            cost=cost,
            policy=policy,
            prefixes=prefixes,
        )
        milliseconds.append(1e3 * (time.process_time() - start))
        check_plan(plan, step.lengths)
        plans.append(plan)
        seconds.append(simulate_planned(plan, plan.steps[0], cost).makespan)
    assert seconds[1] <= seconds[0], f"{step.name} on {layout.label} is slower with prefixes"
    counts = plans[1].counts
    return SharedResult(
        seconds=(seconds[0], seconds[1]),
        counts=(plans[0].counts.num_microbatches[1], counts.num_microbatches[1]),
        milliseconds=(milliseconds[0], milliseconds[1]),
        tokens=counts.tokens / (counts.tokens - counts.shared_tokens),
    )


def shared_table(
    steps: Iterable[FamilyStep], layouts: dict[str, Layout], costs: dict[str, dict[str, CostModel]]
) -> list[str]:
    """The lines of the table: a row per step and layout.

    Args:
        costs: per layout and model.
    """
    models = list(next(iter(costs.values())))
    lines = [
        "| data | layout | "
        + " | ".join(f"shared prefixes, {model} | tokens | M" for model in models)
        + " | ms |",
        "|---" * (3 * len(models) + 3) + "|",
    ]
    speedups = []
    spent = [0.0, 0.0]
    for step in steps:
        for layout_name, layout in layouts.items():
            results = [compare(step, layout, costs[layout_name][model]) for model in models]
            cells = [
                f"{r.speedup:.2f} | {r.tokens:.2f} | {r.counts[0]}, {r.counts[1]}" for r in results
            ]
            times = [sum(r.milliseconds[k] for r in results) / len(results) for k in (0, 1)]
            spent = [total + time for total, time in zip(spent, times, strict=True)]
            lines.append(
                f"| {step.name} | {layout_name} | {' | '.join(cells)} | "
                f"{times[0]:.0f}, {times[1]:.0f} |"
            )
            speedups += [result.speedup for result in results]
    mean = float(np.exp(np.mean(np.log(speedups))))
    return [
        *lines,
        "",
        f"- geometric mean of {len(speedups)} cells: {mean:.2f} times as fast",
        f"- cells that are slower with prefixes: {sum(s < 1 for s in speedups)}",
        f"- time of planning, all cells: {spent[1] / spent[0]:.2f} times that without prefixes",
    ]


def pieces_table(
    steps: Iterable[FamilyStep], layouts: dict[str, Layout], costs: dict[str, CostModel]
) -> list[str]:
    """The lines of the table of families in pieces: a row per step and layout. Layouts without a
    pipeline run a forward pass.

    Args:
        costs: per layout.
    """
    lines = [
        "| data | layout | seconds | with split backward | tokens | M | ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for step in steps:
        for name, layout in layouts.items():
            forward_only = layout.pp == 1
            seconds, held, counts, spent = [], [], [], []
            for backward, split in _POLICIES[: 2 if forward_only else 4]:
                start = time.process_time()
                plan = build_dp_schedule(
                    step.lengths,
                    layout=layout,
                    max_tokens_per_gpu=step.budget,
                    cost=costs[name],
                    policy=Policy(split_samples=split, backward=backward),
                    prefixes=step.prefixes,
                    forward_only=forward_only,
                )
                spent.append(1e3 * (time.process_time() - start))
                check_plan(plan, step.lengths)
                seconds.append(simulate_planned(plan, plan.steps[0], costs[name]).makespan)
                held.append(plan.counts.tokens - plan.counts.shared_tokens)
                counts.append(plan.counts.most_microbatches)
            both = "-" if forward_only else f"{seconds[3] / seconds[2]:.2f}"
            cells = [
                step.name,
                f"{name}, forward pass" if forward_only else name,
                f"{seconds[1] / seconds[0]:.2f} | {both} | {held[1] / held[0]:.2f}",
                f"{counts[0]}, {counts[1]} | {spent[0]:.0f}, {spent[1]:.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def speed_table(num_samples: int, layout: Layout, cost: CostModel, rounds: int) -> list[str]:
    """CPU seconds of planning many groups of 8 with long prompts; medians of each way, in turn."""
    step = _groups("", num_samples, 8, (500, 8000), (300, 3000), 65536)
    groups = np.repeat(np.arange(step.lengths.size // 8), 8).tolist()
    prompts = np.array(step.prefixes.common)
    prompts = np.maximum(prompts, np.roll(prompts, -1)).tolist()
    start = time.process_time()
    from_groups = SharedPrefixes.from_groups(groups, prompts)
    making = time.process_time() - start
    # The same with a system prompt of 200 tokens before all of them.
    common = np.maximum(np.array(from_groups.common), 200)
    common[0] = 0
    one_tree = SharedPrefixes(from_groups.order, tuple(common.tolist()))
    ways = {"without prefixes": None, "groups": from_groups, "one tree": one_tree}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, prefixes in ways.items():
            start = time.process_time()
            build_dp_schedule(
                step.lengths,
                layout=layout,
                max_tokens_per_gpu=step.budget,
                cost=cost,
                prefixes=prefixes,
            )
            times[name].append(time.process_time() - start)
    lines = [f"| {num_samples} samples on {layout.label} | median CPU s |", "|---|---|"]
    lines += [f"| {name} | {np.median(seconds):.1f} |" for name, seconds in times.items()]
    return [*lines, f"| `SharedPrefixes.from_groups` alone | {making:.1f} |"]
