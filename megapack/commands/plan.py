"""Plan the samples of a file, compare with simple packing on the same samples, write plan.json."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from megapack.commands.arguments import (
    add_json,
    add_layout,
    add_lengths,
    add_policy,
    add_steps,
    check_output,
    integer,
    print_json,
    print_table,
    read_layout,
    read_policy,
    read_table,
)
from megapack.commands.costs import Pricing, add_costs, read_pricing
from megapack.data.lengths import LengthTable
from megapack.plan.file import write_plan
from megapack.plan.plan import Plan

if TYPE_CHECKING:
    from megapack.outlook.stats import PlanReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """LENGTHS, the arguments of `build_dp_schedule`, and a cost model."""
    add_lengths(parser)
    parser.add_argument("-o", "--output", default="plan.json", metavar="FILE", help="(plan.json)")
    parser.add_argument(
        "--max-tokens-per-gpu", type=integer, metavar="N", help="the budget, after CP; or"
    )
    parser.add_argument("--micro-batch-size", type=integer, metavar="N", help="samples per row")
    parser.add_argument("--forward-only", action="store_true", help="passes without a backward")
    add_json(parser)
    add_layout(parser)
    add_steps(parser)
    add_policy(parser)
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, compare, write, tell."""
    layout, policy = read_layout(args), read_policy(args)
    table = read_table(args)
    check_output(args.output, args.lengths)
    typical = float((table.lengths**2).sum() / table.lengths.sum())
    pricing = read_pricing(args, layout, typical)
    # The planner's compiler takes a third of a second to import: bad input is told before.
    from megapack.dp_schedule import build_dp_schedule
    from megapack.outlook.baselines import naive_plans
    from megapack.outlook.stats import plan_report

    plan = build_dp_schedule(
        table.lengths,
        layout=layout,
        max_tokens_per_gpu=args.max_tokens_per_gpu,
        micro_batch_size=args.micro_batch_size,
        rollout_ids=table.rollout_ids,
        colocate_ids=table.colocate_ids,
        global_batch_size=args.global_batch_size,
        num_steps=args.num_steps,
        cost=pricing.cost,
        policy=policy,
        forward_only=args.forward_only,
    )
    strategies = {"megapack": plan, **naive_plans(plan, table.lengths)}
    found = {
        name: plan_report(packed, table.lengths, pricing.cost)
        for name, packed in strategies.items()
    }
    write_plan(plan, args.output)
    if args.json:
        print_json(_payload(args, plan, table, pricing, found))
    else:
        _print(args, plan, table, pricing, found)
    return 0


def _payload(
    args: argparse.Namespace,
    plan: Plan,
    table: LengthTable,
    pricing: Pricing,
    found: dict[str, PlanReport],
) -> dict[str, Any]:
    return {
        "plan": args.output,
        "digest": plan.digest(),
        "num_samples": plan.num_samples,
        "num_tokens": int(table.lengths.sum()),
        "num_gpus": plan.layout.world_size,
        "columns": table.columns,
        "time_unit": "seconds" if pricing.in_seconds else "tokens",
        "time_basis": pricing.basis,
        "strategies": {name: result.totals() for name, result in found.items()},
    }


def _print(
    args: argparse.Namespace,
    plan: Plan,
    table: LengthTable,
    pricing: Pricing,
    found: dict[str, PlanReport],
) -> None:
    layout, lengths = plan.layout, table.lengths
    ours = found["megapack"]
    dropped = ours.num_dropped_rollouts
    print(
        f"{lengths.size} samples, {lengths.sum()} tokens ({table.columns}), the longest "
        f"{lengths.max()}, on {layout.world_size} GPUs"
        f"{f'; {dropped} rollouts dropped' if dropped else ''}"
    )
    seconds = ["seconds", "tokens/s/GPU"] if pricing.in_seconds else []
    head = ["", "steps", "M", "rows", "fill", "padding", "imbalance", "bubble", *seconds]
    rows = [[*head, "time/equal work", "time/megapack"]]
    for name, result in found.items():
        rows.append([name, *_cells(result, pricing.in_seconds)])
        rows[-1].append(f"{result.seconds / ours.seconds:.2f}")
    print_table(rows)
    print(f"time {pricing.basis}")
    print(f"{args.output}: digest {plan.digest()[:12]}")


def _cells(result: PlanReport, in_seconds: bool) -> list[str]:
    cells = [
        str(result.num_steps),
        result.microbatch_span,
        str(result.num_rows),
        "-" if result.fill is None else f"{result.fill:.1%}",
        f"{result.padding_fraction:.1%}",
        f"{result.imbalance:.3f}",
        f"{result.bubble_fraction:.1%}",
    ]
    if in_seconds:
        cells += [f"{result.seconds:.4g}", f"{result.tokens_per_gpu_second:.0f}"]
    ratio = result.time_over_equal_work
    return [*cells, "-" if ratio is None else f"{ratio:.3f}"]
