"""Compare plans of the shipped configs: weighed by tokens, and by the cost model of a run.

    python tools/bench_costs.py

Each config's first batch is planned twice for the number of GPUs in its name. Both plans are
simulated with the cost model that a run of the config uses without `plan.cost_model`. The simulated
seconds are no measurement; their ratio says how much a plan that knows attention, the vocabulary
head and fixed costs wins if these cost what the model's sizes say.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack.config.load import load_config
from megapack.cost.model import TOKENS
from megapack.job.config.sections import TrainConfig
from megapack.job.data.batches import plan_steps
from megapack.job.dry_run import check_start, first_batch
from megapack.outlook.stats import PlanReport, plan_report

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def compare(path: Path) -> tuple[PlanReport, PlanReport]:
    """The optimizer steps of a config's first batch, planned by tokens and by cost."""
    world = re.fullmatch(r".*_gpu(\d+)", path.stem)
    if world is None:
        raise ValueError(f"{path.name} does not end in _gpu and a number")
    config = load_config(path, [], TrainConfig)
    layout = check_start(config, int(world[1]))
    batch = first_batch(config)
    cost = config.cost_model(layout)
    by_tokens, by_cost = (
        plan_report(
            plan_steps(config.plan, layout, planned_by, batch.lengths.tolist(), batch.rollout_ids),
            batch.lengths,
            cost,
        )
        for planned_by in (TOKENS, cost)
    )
    return by_tokens, by_cost


def main() -> None:
    """Print the table."""
    print("| config | M by tokens | M by cost | seconds by tokens | seconds by cost | faster |")
    print("|---|---|---|---|---|---|")
    for path in sorted(CONFIGS.glob("*_gpu*.yaml")):
        by_tokens, by_cost = compare(path)
        gain = by_tokens.seconds / by_cost.seconds - 1
        print(
            f"| `{path.stem}` | {by_tokens.microbatch_span} | {by_cost.microbatch_span} | "
            f"{by_tokens.seconds:.2f} | {by_cost.seconds:.2f} | {gain:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
