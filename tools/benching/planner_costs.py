"""The table of what attention's kernels and exchanges change in plans.

Plans of two cost models from sizes: one that counts squared tokens alone, with 5 % of a token for
each further rank of a row, and ours, which follows measured GPUs
(docs/maintainers/calibration.md). Both are judged by ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from megapack import CostModel, Layout, Policy
from megapack.cost.assumed import ATTENTION_TOKENS, GpuSpeed
from megapack.cost.sizes import ModelSizes
from tools.benching.planner_cases import Case, Result, h100_cost, judge, load, mean, plan_of

SAMPLES = 256
POLICY = Policy(context_parallel="dynamic", split_samples="auto")
LAYOUTS = {
    "dp8": Layout(dp=8),
    "dp8 pp4": Layout(dp=8, pp=4),
    "dp8 pp4 vpp3": Layout(dp=8, pp=4, vpp=3),
}
MODELS = {
    "Qwen3-8B": ModelSizes(
        num_layers=36,
        hidden_size=4096,
        ffn_hidden_size=12288,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=151936,
    ),
    "Qwen3-30B-A3B": ModelSizes(
        num_layers=48,
        hidden_size=2048,
        ffn_hidden_size=768,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        vocab_size=151936,
        num_experts=128,
        moe_top_k=8,
    ),
}


def costs_table(traces: Path) -> Iterator[str]:
    """Yield the lines of the table, a row per trace, layout and model."""
    columns = "squares: M, wide rows, pieces | ours: M, wide rows, pieces | squares over ours"
    yield f"| data | layout | model | {columns} |"
    yield "|---" * 6 + "|"
    by_layout: dict[str, list[float]] = {}
    for case in _cases(traces):
        squares, ours = (_planned(case, cost) for cost in (_squares(case), case.cost))
        ratio = squares.ratio / ours.ratio
        by_layout.setdefault(case.layout_name, []).append(ratio)
        cells = " | ".join(
            f"{plan.num_microbatches}, {plan.widths or 'none'}, {plan.num_pieces}"
            for plan in (squares, ours)
        )
        names = f"{case.data} | {case.layout_name} | {case.model}"
        yield f"| {names} | {cells} | {ratio:.3f} |"
    for layout, ratios in by_layout.items():
        yield f"| geometric mean | {layout} | | | | **{mean(ratios):.3f}** |"


def _cases(traces: Path) -> Iterable[Case]:
    for data, (lengths, budget) in load(traces, SAMPLES).items():
        for name, layout in LAYOUTS.items():
            for model, sizes in MODELS.items():
                cost = h100_cost(sizes, layout, lengths, "selective")
                yield Case(data, lengths, budget, name, layout, model, cost)


def _squares(case: Case) -> CostModel:
    """The case's model without what attention's kernels and exchanges take."""
    sizes, speed = MODELS[case.model], GpuSpeed.of("cuda", "bf16")
    assert speed.peak_tflops is not None
    flops = speed.peak_tflops * 1e12 * speed.utilisation
    kinds = sizes.layer_kinds(attention_factor=speed.attention_factor)
    keys = sum(n * kind.layer_attention_tokens(ATTENTION_TOKENS) for kind, n in kinds)
    per_token = case.cost.per_token - keys / flops
    return replace(
        case.cost, per_token=per_token, cp_overhead=0.05, cp_overheads=None, cp_fixed=0.0
    )


def _planned(case: Case, cost: CostModel) -> Result:
    """What the plan of a model is by the case's."""
    plan = plan_of(replace(case, cost=cost), POLICY)
    return judge(case, plan.steps[0], 0.0)
