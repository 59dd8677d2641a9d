"""Draw the timelines of the documents, docs/images/*.png, from generated lengths.

    python tools/make_docs_images.py

It also writes docs/measured/timeline_picture.md. Equal versions of megapack and matplotlib make
equal pictures.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np

from megapack import CostModel, Layout, Plan, Policy, build_dp_schedule
from megapack.base.files import write_whole
from megapack.job.view.page import typical_step
from megapack.job.view.plot import draw_steps
from megapack.job.view.timeline import Timeline, planned
from megapack.outlook.baselines import naive_plans
from megapack.outlook.stats import StepReport, step_report
from megapack.policy import ContextParallel
from tools.pages.measured import versions, write

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"

# Times are in tokens: a micro-batch costs 256 tokens more than it has, as `megapack plan` assumes.
LAYOUT = Layout(dp=4, pp=4, vpp=2)
COST = CostModel(fixed=256 / LAYOUT.num_chunks, per_token=1.0, per_token_sq=1 / 49152)
BUDGET = 8192


def main() -> None:
    """Draw all pictures, print what they say, and write it as a table."""
    lengths = lognormal_lengths(256, mean=1200, sigma=0.9, most=BUDGET)
    plan = planned_by(Policy(), lengths)
    next_fit = naive_plans(plan, np.array(lengths))["next-fit"]
    packings = {"next-fit": Shown(next_fit, COST), "megapack": Shown(plan, COST)}
    # A long sample and few others: fixed and dynamic context parallelism.
    outlier = [BUDGET, *lengths[:63]]
    wide = {
        f"context_parallel={kind}": Shown(planned_by(Policy(context_parallel=kind), outlier), COST)
        for kind in get_args(ContextParallel)
    }
    # The same samples without interleaving: Megatron's order, and orders of operations.
    whole = Layout(dp=LAYOUT.dp, pp=LAYOUT.pp)
    cost = replace(COST, fixed=256 / whole.num_chunks)
    policies = {
        "Megatron's order": Policy(),
        "backward=split": Policy(backward="split"),
        "split_samples=auto": Policy(split_samples="auto"),
        "both": Policy(split_samples="auto", backward="split"),
    }
    orders = {
        name: Shown(planned_by(policy, outlier, whole, cost), cost)
        for name, policy in policies.items()
    }
    compared = {"next_fit_and_megapack": packings, "dynamic_cp": wide, "operations": orders}
    write_table(compared)
    pictures = {name: slowest(shown) for name, shown in compared.items()}
    one = packings["megapack"]
    pictures["step"] = {f"step 0: {one.numbers}": typical_step([one.timeline])}
    FOLDER.mkdir(exist_ok=True)
    for name, steps in pictures.items():
        write_whole(FOLDER / f"{name}.png", draw_steps(steps, "token times", "png"))
        print("\n  ".join([f"{name}.png", *steps]))


@dataclass(frozen=True)
class Shown:
    """A plan whose first step is drawn."""

    plan: Plan
    cost: CostModel

    @property
    def timeline(self) -> Timeline:
        return planned(self.plan, 0, 0, self.cost)

    @cached_property
    def report(self) -> StepReport:
        return step_report(self.plan, self.plan.steps[0], self.cost)

    @property
    def numbers(self) -> str:
        """The numbers to compare."""
        report = self.report
        return (
            f"{report.seconds:.0f} token times, M={report.microbatch_span}, "
            f"bubble {report.bubble_fraction:.1%}"
        )


def planned_by(
    policy: Policy, lengths: Sequence[int], layout: Layout = LAYOUT, cost: CostModel = COST
) -> Plan:
    """The lengths' plan of one step."""
    return build_dp_schedule(
        lengths, layout=layout, max_tokens_per_gpu=BUDGET, cost=cost, policy=policy
    )


def slowest(shown: dict[str, Shown]) -> dict[str, dict[str, Any]]:
    """What is drawn of the slowest rank of each, by a title that says so."""
    return {
        f"{name}, slowest DP rank: {one.numbers}": typical_step([one.timeline], most=1)
        for name, one in shown.items()
    }


def write_table(shown: dict[str, dict[str, Shown]]) -> None:
    """The file that captions link to: what the pictures of slowest ranks say, by their name."""
    body = [
        "| picture | packing | token times | over the shortest | M | slowest DP rank | bubble |",
        "|---|---|---|---|---|---|---|",
    ]
    for picture, each in shown.items():
        least = min(one.report.seconds for one in each.values())
        for name, one in each.items():
            report = one.report
            body.append(
                f"| {picture} | {name} | {report.seconds:.0f} | {report.seconds / least:.2f} "
                f"| {report.microbatch_span} | {report.slowest_rank} "
                f"| {report.bubble_fraction:.1%} |"
            )
    write(
        "timeline_picture",
        "The timelines of docs/images",
        "Each picture is of one batch, as the simulator runs it on the slowest DP rank of each\n"
        f"packing, with dp={LAYOUT.dp}, pp={LAYOUT.pp} and {BUDGET} tokens per GPU. A token time\n"
        "is the time of one token. Bubble: the step's time over the work of that rank's busiest\n"
        "stage, minus 1. `next_fit_and_megapack` has 256 lognormal lengths (mean 1200, sigma 0.9)\n"
        f"and vpp={LAYOUT.vpp}; the others have one sample of {BUDGET} tokens and 63 of those\n"
        "lengths, `operations` with vpp=1.",
        body,
        versions("megapack", "numpy"),
    )


def lognormal_lengths(count: int, *, mean: float, sigma: float, most: int) -> list[int]:
    """Lengths with a lognormal distribution, as responses have."""
    rng = random.Random(1)
    mu = math.log(mean) - sigma**2 / 2
    return [min(most, max(16, int(rng.lognormvariate(mu, sigma)))) for _ in range(count)]


if __name__ == "__main__":
    main()
