"""Draw the pictures of the documents, docs/images/, from generated lengths.

    python tools/make_docs_images.py

Equal versions of megapack and matplotlib make equal files.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from megapack import CostModel, Layout, Policy, build_dp_schedule
from megapack.base.files import write_whole
from megapack.job.view.page import step_data, typical_step
from megapack.job.view.plot import draw_steps
from megapack.job.view.timeline import Timeline, planned
from megapack.outlook.baselines import naive_plans
from megapack.outlook.stats import StepReport, step_report
from megapack.policy import ContextParallel

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"

# Times are in tokens: a micro-batch costs 256 tokens more than it has, as `megapack plan` assumes.
LAYOUT = Layout(dp=4, pp=4, vpp=2)
COST = CostModel(fixed=256 / LAYOUT.num_chunks, per_token=1.0, per_token_sq=1 / 49152)
BUDGET = 8192


def main() -> None:
    """Draw all pictures."""
    lengths = lognormal_lengths(256, mean=1200, sigma=0.9, most=BUDGET)
    plan = build_dp_schedule(lengths, layout=LAYOUT, max_tokens_per_gpu=BUDGET, cost=COST)
    plans = {"next-fit": naive_plans(plan, np.array(lengths))["next-fit"], "megapack": plan}
    reports = {name: step_report(plan, plan.steps[0], COST) for name, plan in plans.items()}
    named = {titled(name, reports[name]): planned(plans[name], 0, 0, COST) for name in plans}
    FOLDER.mkdir(exist_ok=True)
    unit = "token times"
    # A long sample and few others: fixed and dynamic context parallelism.
    outlier = [BUDGET, *lengths[:63]]
    shared = {}
    for kind in get_args(ContextParallel):
        step = build_dp_schedule(
            outlier,
            layout=LAYOUT,
            max_tokens_per_gpu=BUDGET,
            cost=COST,
            policy=Policy(context_parallel=kind),
        )
        title = titled(f"context_parallel={kind}", step_report(step, step.steps[0], COST))
        shared[title] = planned(step, 0, 0, COST)
    # The same samples without interleaving: Megatron's order, and orders of operations.
    ordered = {}
    whole = Layout(dp=LAYOUT.dp, pp=LAYOUT.pp)
    cost = replace(COST, fixed=256 / whole.num_chunks)
    policies = {
        "Megatron's order": Policy(),
        "backward=split": Policy(backward="split"),
        "split_samples=auto": Policy(split_samples="auto"),
        "both": Policy(split_samples="auto", backward="split"),
    }
    for name, policy in policies.items():
        step = build_dp_schedule(
            outlier, layout=whole, max_tokens_per_gpu=BUDGET, cost=cost, policy=policy
        )
        title = titled(name, step_report(step, step.steps[0], cost))
        ordered[title] = planned(step, 0, 0, cost)
    one, timeline = titled("step 0", reports["megapack"]), planned(plan, 0, 0, COST)
    pictures = {
        "dynamic_cp.png": draw_steps(slowest(shared), unit, "png"),
        "next_fit_and_megapack.png": draw_steps(slowest(named), unit, "png"),
        "operations.png": draw_steps(slowest(ordered), unit, "png"),
        "step.png": draw_steps({one: typical_step([timeline])}, unit, "png"),
    }
    for name, picture in pictures.items():
        write_whole(FOLDER / name, picture)
        print(f"{FOLDER / name}: {len(picture) / 1000:.0f} kB")


def lognormal_lengths(count: int, *, mean: float, sigma: float, most: int) -> list[int]:
    """Lengths with a lognormal distribution, as responses have."""
    rng = random.Random(1)
    mu = math.log(mean) - sigma**2 / 2
    return [min(most, max(16, int(rng.lognormvariate(mu, sigma)))) for _ in range(count)]


def slowest(timelines: dict[str, Timeline]) -> dict[str, dict[str, Any]]:
    """What is drawn of the slowest rank of each."""
    return {
        title: step_data([timeline], [int(np.argmax(timeline.rank_ends))])
        for title, timeline in timelines.items()
    }


def titled(name: str, step: StepReport) -> str:
    """A title with the numbers to compare."""
    return (
        f"{name}: {step.seconds:.0f} token times, M={step.microbatch_span}, "
        f"bubble {step.bubble_fraction:.0%}"
    )


if __name__ == "__main__":
    main()
