"""The table of hybrid models: how far their plans are from equal work.

Costs are those of the shipped configs' sizes. On dp4 pp4 the stages of Qwen3.5-35B-A3B have 2, 3, 2
and 3 attention layers, those of Nemotron-3-Nano 2, 1, 2 and 1, and those of Qwen3-Next 3 each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from megapack import CostModel, Layout, Policy, build_dp_schedule
from megapack.config.load import load_config
from megapack.config.shipped import find_config
from megapack.cost.sizes import typical_length
from megapack.job.config.sections import TrainConfig
from megapack.outlook.stats import plan_report

CONFIGS = {
    "Qwen3-Next-80B-A3B": "qwen3_next_80b_a3b_dp16_pp4_ep16_gpu64",
    "Qwen3.5-35B-A3B": "qwen3p5_35b_a3b_dp16_pp2_ep8_gpu32",
    "Nemotron-3-Nano-30B-A3B": "nemotron3_nano_30b_a3b_dp8_pp4_ep8_gpu32",
}
LAYOUT = Layout(dp=4, pp=4)
POLICIES = {
    "fixed": Policy(),
    "dynamic CP": Policy(context_parallel="dynamic"),
    "pieces, split backward": Policy(split_samples="auto", backward="split"),
}


def hybrid_table(data: Iterable[tuple[str, np.ndarray, int]]) -> Iterator[str]:
    """Yield the lines of the table: a row per data set, model and layout.

    Args:
        data: names, lengths and budgets.
    """
    yield f"| data | model | layout | one weight | {' | '.join(POLICIES)} |"
    yield "|---" * (len(POLICIES) + 4) + "|"
    for name, lengths, budget in data:
        for model, file in CONFIGS.items():
            config = load_config(find_config(f"configs/{file}.yaml"), [], TrainConfig)
            sizes = config.layout
            own = sizes.to_layout((sizes.dp or 1) * sizes.pp)
            for label, layout in ((own.label, own), ("dp4 pp4", LAYOUT)):
                cells = _cells(config, layout, lengths, budget)
                yield f"| {name} | {model} | {label} | {' | '.join(cells)} |"


def _cells(config: TrainConfig, layout: Layout, lengths: np.ndarray, budget: int) -> Iterator[str]:
    cost = config.cost_from_sizes(layout)
    memory = config.memory_model()
    limits = memory.sizes.max_width(layout), memory.least_piece(layout)
    yield _ratio(_one_weight(cost, lengths), cost, layout, lengths, budget, Policy())
    for policy in POLICIES.values():
        yield _ratio(cost, cost, layout, lengths, budget, policy.within(*limits))


def _one_weight(cost: CostModel, lengths: np.ndarray) -> CostModel:
    """The cost model with one weight per stage: that of samples of the typical length."""
    if cost.square_factors is None or cost.stage_weights is None:
        return cost
    square = cost.per_token_sq * typical_length(lengths)
    weights = [
        weight * (cost.per_token + factor * square)
        for weight, factor in zip(cost.stage_weights, cost.square_factors, strict=True)
    ]
    mean = sum(weights) / len(weights)
    return replace(cost, stage_weights=tuple(w / mean for w in weights), square_factors=None)


def _ratio(
    known: CostModel,
    cost: CostModel,
    layout: Layout,
    lengths: np.ndarray,
    budget: int,
    policy: Policy,
) -> str:
    """Time over equal work by `cost` of what the planner makes of the costs that it knows."""
    plan = build_dp_schedule(
        lengths, layout=layout, max_tokens_per_gpu=budget, cost=known, policy=policy
    )
    report = plan_report(plan, lengths, cost)
    return f"{report.seconds / report.equal_work_seconds:.3f}"
