"""The cells of the planner's tables: a trace on a layout with a model, plans of it, their quality.

Quality is time over equal work, see `tools/bench_planner.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from megapack import (
    CostModel,
    Layout,
    MicroBatch,
    Plan,
    Policy,
    StepPlan,
    build_dp_schedule,
    simulate,
)
from megapack.base.choices import Recompute
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.sizes import ModelSizes
from megapack.outlook.baselines import Ranks, Strategy

# Each micro-batch costs this many tokens more than its samples: launches, small GEMMs, p2p.
FIXED_TOKENS = 256
# Tokens of a row cost this part more for each further DP rank that shares it.
CP_OVERHEAD = 0.05
# Seconds per squared token over seconds per token.
MODELS = {"7B": 1 / 49152, "30B-A3B": 1 / 12288}
# File and budget per row of each trace.
TRACES = {
    "servegen": ("servegen_deepseek_r1_resampled.csv", 65536),
    "aime24": ("skythought_aime24_longcot_g16.csv", 51200),
    "math500": ("skythought_math500_g4.csv", 36864),
    "azure": ("azure2023_conv.csv", 16384),
    "openchat": ("openchat_v1_sft.csv", 32768),
}
# Columns of tables that have our plans beside those of others.
OURS = {
    "megapack": Policy(),
    "dynamic CP": Policy(context_parallel="dynamic"),
    "everything": Policy(context_parallel="dynamic", split_samples="auto", backward="split"),
}


def cost_of(layout: Layout, model: str) -> CostModel:
    """The cost model of the tables."""
    per_token = 1e-6
    fixed = FIXED_TOKENS * per_token / layout.num_chunks
    return CostModel(
        fixed=fixed,
        per_token=per_token,
        per_token_sq=per_token * MODELS[model],
        cp_overhead=CP_OVERHEAD,
    )


def h100_cost(
    sizes: ModelSizes, layout: Layout, lengths: np.ndarray, recompute: Recompute
) -> CostModel:
    """The cost model of a model's sizes, on H100s."""
    speed = GpuSpeed.of("cuda", "bf16")
    mean_length = float(lengths.mean())
    return cost_from_sizes(sizes, layout, speed, recompute=recompute, mean_length=mean_length)


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    data: str
    lengths: np.ndarray
    budget: int
    layout_name: str
    layout: Layout
    model: str
    cost: CostModel

    @property
    def work(self) -> np.ndarray:
        """Forward of each sample, in tokens."""
        square = self.cost.per_token_sq / self.cost.per_token
        return self.lengths + self.lengths.astype(float) ** 2 * square

    @property
    def equal_seconds(self) -> float:
        """Seconds of the work spread evenly over all stages, without a head."""
        passes = 1 + self.cost.backward_ratio
        num_parts = self.layout.dp * self.layout.pp * self.layout.cp
        return self.cost.per_token * float(self.work.sum()) * passes / num_parts


@dataclass(frozen=True)
class Result:
    """How good a strategy's plan of a case is."""

    ratio: float
    """Time over equal work."""
    num_over: int
    """Rows over the budget."""
    worst_row: float
    """Tokens of the longest row, divided by the budget."""
    num_microbatches: int
    """The most micro-batches of a rank."""
    milliseconds: float
    """CPU time of planning."""
    widths: str = ""
    """Rows over 2 ranks, over 4, and so on."""
    num_pieces: int = 0
    """Rows that hold a piece of a sample."""
    live_tokens: float = 0.0
    """Most tokens whose activations a GPU holds at once."""


def load(folder: Path, num_samples: int) -> dict[str, tuple[np.ndarray, int]]:
    """Lengths and budget per data set: the traces, or generated lengths without the folder."""
    if folder.is_dir():
        data = {}
        for name, (file, budget) in TRACES.items():
            columns = np.loadtxt(folder / file, delimiter=",", skiprows=1, dtype=np.int64)
            data[name] = (columns[:num_samples, :2].sum(axis=1), budget)
        return data
    rng = np.random.default_rng(0)
    lognormal = np.clip(rng.lognormal(7, 1, num_samples), 1, 32768).astype(np.int64)
    short = rng.integers(200, 1500, num_samples)
    long = rng.integers(12000, 30000, num_samples)
    bimodal = np.where(rng.random(num_samples) < 0.8, short, long)
    return {"lognormal": (lognormal, 32768), "bimodal": (bimodal, 32768)}


def cases(data: dict[str, tuple[np.ndarray, int]], layouts: Mapping[str, Layout]) -> Iterator[Case]:
    """Every trace on every layout with every model."""
    for name, (lengths, budget) in data.items():
        for layout_name, layout in layouts.items():
            for model in MODELS:
                cost = cost_of(layout, model)
                yield Case(name, lengths, budget, layout_name, layout, model, cost)


def plan_of(case: Case, policy: Policy) -> Plan:
    """Our plan."""
    return build_dp_schedule(
        case.lengths,
        layout=case.layout,
        max_tokens_per_gpu=case.budget,
        cost=case.cost,
        policy=policy,
    )


def run_ours(case: Case, policy: Policy) -> Result:
    """Plan a case."""
    start = time.process_time()
    plan = plan_of(case, policy)
    return judge(case, plan.steps[0], time.process_time() - start)


def run_strategy(case: Case, strategy: Strategy, budget: int | None = None) -> Result:
    """Plan a case as another scheduler does, under the case's budget or another."""
    start = time.process_time()
    ranks = strategy(case.lengths, case.work, case.layout, budget or case.budget)
    seconds = time.process_time() - start
    return judge(case, as_step(case, ranks), seconds)


def runs_of(
    strategies: Mapping[str, Strategy], policies: Mapping[str, Policy]
) -> dict[str, Callable[[Case], Result]]:
    """What plans a case for each column of a table: strategies, then policies of ours."""
    others = {name: partial(run_strategy, strategy=own) for name, own in strategies.items()}
    return {**others, **{name: partial(run_ours, policy=own) for name, own in policies.items()}}


def as_step(case: Case, ranks: Ranks) -> StepPlan:
    """The step of a strategy's rows; a row that several ranks have lies over all of them."""

    def micro_batch(row: list[int], owners: tuple[int, ...]) -> MicroBatch:
        sizes = case.lengths[row]
        tokens = int(sizes.sum())
        squares = int((sizes * sizes).sum())
        dp_ranks = owners if len(owners) > 1 else ()
        return MicroBatch(tuple(row), tokens, tokens, squares, tokens, dp_ranks=dp_ranks)

    columns = []
    for column in zip(*ranks, strict=True):
        owners: dict[tuple[int, ...], list[int]] = {}
        for rank, row in enumerate(column):
            owners.setdefault(tuple(row) or (~rank,), []).append(rank)
        shared = {rank: tuple(own) for own in owners.values() for rank in own}
        columns.append([micro_batch(row, shared[rank]) for rank, row in enumerate(column)])
    rows = tuple(zip(*columns, strict=True))
    group = case.layout.group_size if case.layout.vpp > 1 else None
    return StepPlan(rows, len(rows[0]), group, (), ())


def judge(case: Case, step: StepPlan, seconds: float) -> Result:
    """How good a step is that took `seconds` of planning."""
    lockstep = case.layout.ep_spans_dp
    simulation = simulate(step, layout=case.layout, cost=case.cost, lockstep=lockstep)
    rows = [mb.row_tokens / mb.width for mb in step.microbatches]
    over = [tokens for tokens in rows if tokens > case.budget]
    samples = sorted(i for mb in step.microbatches for i in mb.begun_samples)
    assert samples == list(range(case.lengths.size)), "a strategy lost samples"
    widths = [mb.width for mb in step.microbatches if mb.width > 1]
    return Result(
        ratio=simulation.makespan / case.equal_seconds,
        num_over=len(over),
        worst_row=max(rows) / case.budget,
        num_microbatches=max(map(len, step.ranks)),
        milliseconds=1e3 * seconds,
        widths=" ".join(f"{widths.count(w)}x{w}" for w in sorted(set(widths))),
        num_pieces=step.counts.num_pieces,
        live_tokens=simulation.peak_live_tokens,
    )


def mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
