"""How long planning takes: sizes with targets, and the growth in samples and in ranks."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megapack import Layout, Policy, build_dp_schedule
from tools.benching.planner_cases import Case, cost_of, run_ours

# Calls per size after one that warms up; the median counts. Plans that take longer are made less
# often.
REPEATS = 7
LARGE_REPEATS = 3
LARGE_SECONDS = 1.0


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths from a seed, and the budget of a row."""

    mean_log: float
    sigma_log: float
    shortest: int
    longest: int
    budget: int

    def drawn(self, num_samples: int) -> np.ndarray:
        """int64 [n]."""
        drawn = np.random.default_rng(0).lognormal(self.mean_log, self.sigma_log, num_samples)
        return np.clip(drawn, self.shortest, self.longest).astype(np.int64)


# Around 1,800 tokens, all within the budget.
SHORT = Lengths(7.5, 1.0, 16, 32768, 32768)
# Around 4,000 tokens. One sample in eight is over the budget, by up to eight times.
LONG = Lengths(8.3, 1.2, 32, 131072, 16384)
DYNAMIC = Policy(context_parallel="dynamic")
MODEL = "7B"


@dataclass(frozen=True)
class Series:
    """Sizes of plans that grow."""

    title: str
    lengths: Lengths
    policy: Policy
    sizes: tuple[tuple[int, Layout], ...]
    """Samples and layout of each plan."""


SERIES = (
    Series(
        "fixed, 1,000 samples per DP rank, pp=8, vpp=2",
        SHORT,
        Policy(),
        tuple(
            (n, Layout(dp=max(1, n // 1000), pp=8, vpp=2))
            for n in (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
        ),
    ),
    Series(
        "dynamic CP, 32 samples per DP rank, pp=1",
        LONG,
        DYNAMIC,
        tuple((32 * dp, Layout(dp=dp)) for dp in (32, 128, 512, 2048)),
    ),
    Series(
        "dynamic CP, 128 samples per DP rank, pp=4",
        LONG,
        DYNAMIC,
        tuple((128 * dp, Layout(dp=dp, pp=4)) for dp in (8, 32, 128, 512)),
    ),
)
# The growth in ranks alone.
RANKS = Series(
    "dynamic CP, 16,384 samples, pp=4",
    LONG,
    DYNAMIC,
    tuple((16384, Layout(dp=dp, pp=4)) for dp in (32, 128, 512)),
)


@dataclass(frozen=True)
class Target:
    """A size of plan, and the CPU seconds that it should take at most."""

    num_samples: int
    layout: Layout
    policy: Policy
    seconds: float
    lengths: Lengths = SHORT


ALL = Policy(context_parallel="dynamic", split_samples="auto", backward="split")
NAMES = {DYNAMIC: "dynamic CP", ALL: "dynamic CP, pieces, split backward"}
TARGETS = (
    Target(2048, Layout(dp=8, pp=4, vpp=2), Policy(search=0), 0.005),
    Target(2048, Layout(dp=8, pp=4, vpp=2), Policy(), 0.020),
    Target(32768, Layout(dp=64, pp=8, vpp=2), Policy(), 0.250),
    Target(1_000_000, Layout(dp=1024, pp=8, vpp=2), Policy(), 4.0),
    Target(8192, Layout(dp=256), DYNAMIC, 1.0, LONG),
    Target(8192, Layout(dp=256, pp=4), DYNAMIC, 1.0, LONG),
    Target(65536, Layout(dp=2048), DYNAMIC, 10.0, LONG),
    Target(65536, Layout(dp=512, pp=4), DYNAMIC, 10.0, LONG),
    Target(2048, Layout(dp=8, pp=4, vpp=2), ALL, 0.100, LONG),
    Target(32768, Layout(dp=64, pp=8, vpp=2), ALL, 2.0, LONG),
)


def plan_seconds(num_samples: int, layout: Layout, policy: Policy, drawn: Lengths = SHORT) -> float:
    """Median CPU seconds of a plan."""
    lengths = drawn.drawn(num_samples)
    cost = cost_of(layout, MODEL)
    times: list[float] = []
    while len(times) <= (LARGE_REPEATS if max(times, default=0) > LARGE_SECONDS else REPEATS):
        began = time.process_time()
        build_dp_schedule(
            lengths, layout=layout, max_tokens_per_gpu=drawn.budget, cost=cost, policy=policy
        )
        times.append(time.process_time() - began)
    return statistics.median(times[1:])


def target_table() -> list[str]:
    """CPU milliseconds of each target."""
    lines = [
        "| samples | layout | policy | search | CPU ms | target ms | peak RSS, GiB |",
        "|---" * 7 + "|",
    ]
    for target in TARGETS:
        policy = target.policy
        seconds = plan_seconds(target.num_samples, target.layout, policy, target.lengths)
        lines.append(
            f"| {target.num_samples} | {target.layout.label} | {NAMES.get(policy, 'fixed')} "
            f"| {policy.search} | {1e3 * seconds:.1f} | {1e3 * target.seconds:.0f} "
            f"| {peak_gib():.2f} |"
        )
    return lines


def gain_table() -> list[str]:
    """Simulated seconds of the targets' steps with rows over several ranks, beside rows on one."""
    lines = ["| samples | layout | fixed | dynamic CP | over equal work |", "|---" * 5 + "|"]
    for target in TARGETS:
        if target.policy != DYNAMIC:
            continue
        layout, lengths = target.layout, target.lengths
        drawn, cost = lengths.drawn(target.num_samples), cost_of(layout, MODEL)
        case = Case("", drawn, lengths.budget, layout.label, layout, MODEL, cost)
        fixed, wide = (run_ours(case, policy).ratio for policy in (Policy(), DYNAMIC))
        lines.append(
            f"| {target.num_samples} | {layout.label} | {fixed * case.equal_seconds:.3f} "
            f"| {wide * case.equal_seconds:.3f} | {wide:.3f} |"
        )
    return lines


Points = dict[str, list[tuple[int, float]]]


def growth_tables() -> tuple[list[str], Points]:
    """CPU milliseconds by number of samples and by number of ranks; of the samples also as points
    (samples, seconds) by title."""
    lines = []
    points: Points = {}
    for series in (*SERIES, RANKS):
        lines += [
            f"{series.title}:",
            "",
            "| samples | layout | CPU ms | us per sample | ns per sample and log2(samples) |",
            "|---" * 5 + "|",
        ]
        own = []
        for num_samples, layout in series.sizes:
            seconds = plan_seconds(num_samples, layout, series.policy, series.lengths)
            own.append((num_samples, seconds))
            each = seconds / num_samples
            lines.append(
                f"| {num_samples} | {layout.label} | {1e3 * seconds:.1f} | {1e6 * each:.2f} "
                f"| {1e9 * each / math.log2(num_samples):.0f} |"
            )
        lines.append("")
        if series in SERIES:
            points[series.title] = own
    return lines[:-1], points


def draw(points: Points, path: Path) -> None:
    """The growth on two logarithmic axes, beside n log n through the first point of each series."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "megapack"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4.4), layout="constrained")
    label: str | None = "n log n from the first point"
    for title, own in points.items():
        samples, seconds = zip(*own, strict=True)
        axes.loglog(samples, [1e3 * s for s in seconds], "o-", label=title)
        first = seconds[0] / (samples[0] * math.log2(samples[0]))
        law = [1e3 * first * n * math.log2(n) for n in samples]
        axes.loglog(samples, law, "--", color="gray", linewidth=0.8, label=label)
        label = None
    axes.set_xlabel("samples")
    axes.set_ylabel("CPU ms to plan")
    # Below the axes, where it hides no line.
    figure.legend(fontsize="small", loc="outside lower left", frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def peak_gib() -> float:
    """Peak memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak / 2 ** (20 if sys.platform != "darwin" else 30)
