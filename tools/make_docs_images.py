"""The pictures of the documents, from generated lengths: docs/images/.

    python tools/make_docs_images.py

Equal versions of megapack and matplotlib make equal files.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from megapack import CostModel, Layout, build_dp_schedule
from megapack.baselines import naive_steps
from megapack.files import write_whole
from megapack.plan import Plan
from megapack.plot import draw_step, draw_timelines
from megapack.timeline import Timeline, planned

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"

# A token is the unit of time: a micro-batch costs 256 more than it has, as `megapack plan` assumes.
LAYOUT = Layout(dp=4, pp=4, vpp=2)
COST = CostModel(fixed=256 / LAYOUT.num_chunks, per_token=1.0, per_token_sq=1 / 49152)
BUDGET = 8192


def main() -> None:
    """Draw all."""
    lengths = lognormal_lengths(256, mean=1200, sigma=0.9, most=BUDGET)
    plan = build_dp_schedule(lengths, layout=LAYOUT, max_tokens_per_gpu=BUDGET, cost=COST)
    ours = planned(plan, 0, 0, COST)
    next_fit = simulated(plan, np.array(lengths), "next-fit")
    named = {titled("next-fit", next_fit): next_fit, titled("megapack", ours): ours}
    FOLDER.mkdir(exist_ok=True)
    unit = "token times"
    pictures = {
        "next_fit_and_megapack.png": draw_timelines(named, unit, "png"),
        "step.png": draw_step(ours, unit, "png"),
    }
    for name, picture in pictures.items():
        write_whole(FOLDER / name, picture)
        print(f"{FOLDER / name}: {len(picture) / 1000:.0f} kB")


def lognormal_lengths(count: int, *, mean: float, sigma: float, most: int) -> list[int]:
    """Tokens of samples, spread as responses are."""
    rng = random.Random(1)
    mu = math.log(mean) - sigma**2 / 2
    return [min(most, max(16, int(rng.lognormvariate(mu, sigma)))) for _ in range(count)]


def simulated(plan: Plan, lengths: np.ndarray, strategy: str) -> Timeline:
    """The plan's samples as a simple strategy packs them."""
    steps = naive_steps(plan, lengths)[strategy]
    return planned(replace(plan, steps=steps), 0, 0, COST)


def titled(name: str, timeline: Timeline) -> str:
    """What a reader should compare."""
    end = max(timeline.rank_ends)
    counts = {len(rank) for rank in timeline.step.ranks}
    slowest = timeline.rank_ends.index(end)
    bubble = end / timeline.stage_seconds[slowest] - 1
    return f"{name}: {end:.0f} token times, M={max(counts)}, bubble {bubble:.0%}"


if __name__ == "__main__":
    main()
