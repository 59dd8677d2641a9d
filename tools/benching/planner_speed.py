"""How long planning takes: sizes with targets, and the growth from 1,000 samples to a million."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megapack import CostModel, Layout, Plan, Policy, build_dp_schedule

# Lengths are lognormal around 1,800 tokens, from 16 to 32,768, which is also the budget of a row.
MEAN_LOG = 7.5
SIGMA_LOG = 1.0
SHORTEST = 16
BUDGET = 32768
# Calls per size after one that warms up; the median counts. Large plans are made less often.
REPEATS = 7
LARGE_REPEATS = 3
LARGE = 100_000
# The growth: samples, about 1,000 on each DP rank, on pp=8, vpp=2.
GROWTH = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
SAMPLES_PER_RANK = 1000


@dataclass(frozen=True)
class Target:
    """A size of plan, and the CPU seconds that it should take at most."""

    num_samples: int
    layout: Layout
    policy: Policy
    seconds: float


TARGETS = (
    Target(2048, Layout(dp=8, pp=4, vpp=2), Policy(search=0), 0.005),
    Target(2048, Layout(dp=8, pp=4, vpp=2), Policy(), 0.020),
    Target(32768, Layout(dp=64, pp=8, vpp=2), Policy(), 0.250),
    Target(1_000_000, Layout(dp=1024, pp=8, vpp=2), Policy(), 4.0),
)


def drawn_lengths(num_samples: int) -> np.ndarray:
    """int64 [n], from a seed."""
    drawn = np.random.default_rng(0).lognormal(MEAN_LOG, SIGMA_LOG, num_samples)
    return np.clip(drawn, SHORTEST, BUDGET).astype(np.int64)


def plan(num_samples: int, layout: Layout, policy: Policy) -> tuple[float, Plan]:
    """Median CPU seconds of a plan of the 7B model's costs, and the plan."""
    lengths = drawn_lengths(num_samples)
    per_token = 1e-6
    cost = CostModel(
        fixed=256 * per_token / layout.num_chunks,
        per_token=per_token,
        per_token_sq=per_token / 49152,
    )
    times = []
    for _ in range(1 + (LARGE_REPEATS if num_samples > LARGE else REPEATS)):
        began = time.process_time()
        made = build_dp_schedule(
            lengths, layout=layout, max_tokens_per_gpu=BUDGET, cost=cost, policy=policy
        )
        times.append(time.process_time() - began)
    return statistics.median(times[1:]), made


def target_table() -> list[str]:
    """CPU milliseconds of each target."""
    lines = [
        "| samples | layout | search | CPU ms | target ms | peak RSS of the process, GiB |",
        "|---" * 6 + "|",
    ]
    for target in TARGETS:
        seconds, _ = plan(target.num_samples, target.layout, target.policy)
        lines.append(
            f"| {target.num_samples} | {target.layout.label} | {target.policy.search} "
            f"| {1e3 * seconds:.1f} | {1e3 * target.seconds:.0f} | {peak_gib():.2f} |"
        )
    return lines


def growth_table() -> tuple[list[str], list[tuple[int, float]]]:
    """CPU milliseconds by number of samples, and the same as points (samples, seconds)."""
    lines = [
        "| samples | layout | CPU ms | us per sample | ns per sample and log2(samples) |",
        "|---" * 5 + "|",
    ]
    points = []
    for num_samples in GROWTH:
        layout = Layout(dp=max(1, num_samples // SAMPLES_PER_RANK), pp=8, vpp=2)
        seconds, _ = plan(num_samples, layout, Policy())
        points.append((num_samples, seconds))
        each = seconds / num_samples
        lines.append(
            f"| {num_samples} | {layout.label} | {1e3 * seconds:.1f} | {1e6 * each:.2f} "
            f"| {1e9 * each / math.log2(num_samples):.0f} |"
        )
    return lines, points


def draw(points: list[tuple[int, float]], path: Path) -> None:
    """The growth on two logarithmic axes, beside n log n through the first point."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "megapack"
    from matplotlib import pyplot

    samples, seconds = zip(*points, strict=True)
    first = seconds[0] / (samples[0] * math.log2(samples[0]))
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    axes.loglog(samples, [1e3 * s for s in seconds], "o-", label="megapack")
    axes.loglog(
        samples,
        [1e3 * first * n * math.log2(n) for n in samples],
        "--",
        color="gray",
        label="n log n from the first point",
    )
    axes.set_xlabel("samples, 1,000 on each DP rank")
    axes.set_ylabel("CPU ms to plan")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def peak_gib() -> float:
    """Peak memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak / 2 ** (20 if sys.platform != "darwin" else 30)
