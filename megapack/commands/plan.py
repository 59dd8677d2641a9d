"""Plan the samples of a file, compare with simple packing on the same samples, write plan.json."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megapack.commands.arguments import (
    add_json,
    add_layout,
    add_lengths,
    add_output,
    add_policy,
    add_steps,
    check_output,
    integer,
    listed,
    output_of,
    print_json,
    read_layout,
    read_policy,
    read_table,
    write_result,
)
from megapack.commands.costs import Pricing, add_model, in_unit, read_costs
from megapack.commands.parser import Parser
from megapack.commands.tables import Column, fact_columns, print_columns
from megapack.cost.sizes import typical_length
from megapack.errors import PlanError
from megapack.job.data.lengths import LengthTable
from megapack.outlook.baselines import HOSTS, naive_plans, peer_plans
from megapack.plan.facts import FEATURES, columns_named, features_of
from megapack.plan.plan import Plan

if TYPE_CHECKING:
    from megapack.outlook.stats import PlanReport

EXAMPLE = "megapack plan lengths.csv --dp 8 --pp 4 --vpp 2 --max-tokens-per-gpu 16384"


def add_arguments(parser: Parser) -> None:
    """Add LENGTHS, the arguments of `build_dp_schedule`, and a cost model."""
    add_lengths(parser)
    add_output(parser, "plan.json", "the plan")
    parser.add_argument(
        "--max-tokens-per-gpu",
        type=integer,
        metavar="N",
        help="the budget: tokens that a row may have on one GPU, after CP; or",
    )
    parser.add_argument("--micro-batch-size", type=integer, metavar="N", help="samples per row")
    parser.add_argument("--forward-only", action="store_true", help="plan a pass without backwards")
    parser.add_argument(
        "--explain", action="store_true", help="also say which options would make the step faster"
    )
    parser.add_argument(
        "--compare",
        type=partial(listed, tuple(HOSTS)),
        metavar="HOST,...",
        default=(),
        help=f"also plan as these schedulers do, and find their best budget: {', '.join(HOSTS)}",
    )
    add_json(parser)
    add_layout(parser)
    add_steps(parser)
    add_policy(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, compare, write and print."""
    layout = read_layout(args)
    policy = read_policy(args)
    table = read_table(args)
    check_output(args, args.lengths)
    typical = typical_length(table.lengths)
    costs = read_costs(args, has_images=table.images is not None)
    pricing = costs.pricing(layout, typical)
    # The planner's compiler takes a third of a second to import: report bad input before.
    from megapack.dp_schedule import build_dp_schedule
    from megapack.outlook.stats import plan_report

    make = partial(
        build_dp_schedule,
        table.lengths,
        layout=layout,
        max_tokens_per_gpu=args.max_tokens_per_gpu,
        micro_batch_size=args.micro_batch_size,
        rollout_ids=table.rollout_ids,
        colocate_ids=table.colocate_ids,
        adapter_ids=table.adapter_ids,
        global_batch_size=args.global_batch_size,
        num_steps=args.num_steps,
        cost=pricing.cost,
        forward_only=args.forward_only,
        prefixes=table.prefixes,
        images=table.images,
    )
    plan = make(policy=policy)
    strategies = {"megapack": plan}
    for rival in dict.fromkeys(f.rival for f in features_of(plan.counts) if f.rival):
        without = {f.setting: f.off for f in FEATURES if f.rival == rival}
        # A sample over the budget of one rank or row has no such plan to compare with.
        with contextlib.suppress(PlanError):
            other = replace(policy, oversize="error", **without)  # type: ignore[arg-type]
            strategies[rival] = make(policy=other)
    strategies |= naive_plans(plan, table.lengths)
    report = partial(plan_report, lengths=table.lengths, cost=pricing.cost)
    reports = {name: report(strategy) for name, strategy in strategies.items()}
    tuned = {}
    for setting, ways in (HOSTS[name] for name in args.compare):
        for name, way in ways.items():
            plans = peer_plans(plan, table.lengths, pricing.cost, way)
            tried = {tokens: report(other) for tokens, other in plans.items()}
            reports[name] = next(iter(tried.values()))
            best, fastest = min(tried.items(), key=lambda item: item[1].seconds)
            tuned[name] = (f"{setting} {best}", fastest)
    write_result(args, plan.to_json() + "\n")
    if args.json:
        print_json(_payload(args, plan, table, pricing, reports, tuned))
    else:
        _print(args, plan, table, pricing, reports, tuned)
    return 0


def _payload(
    args: argparse.Namespace,
    plan: Plan,
    table: LengthTable,
    pricing: Pricing,
    reports: dict[str, PlanReport],
    tuned: dict[str, tuple[str, PlanReport]],
) -> dict[str, Any]:
    payload = {
        "plan": output_of(args),
        "digest": plan.digest(),
        "num_samples": plan.num_samples,
        "num_tokens": int(table.lengths.sum()),
        "num_gpus": plan.layout.world_size,
        "columns": table.columns,
        "time_unit": "seconds" if pricing.in_seconds else "tokens",
        "time_basis": pricing.basis,
        "strategies": {name: in_unit(report.totals(), pricing) for name, report in reports.items()},
        "best_budgets": {
            name: {"setting": setting, **in_unit(report.totals(), pricing)}
            for name, (setting, report) in tuned.items()
        },
    }
    if args.explain:
        payload["freedoms"] = [in_unit(gain, pricing) for gain in plan.explain().to_payload()]
    return payload


def _print(
    args: argparse.Namespace,
    plan: Plan,
    table: LengthTable,
    pricing: Pricing,
    reports: dict[str, PlanReport],
    tuned: dict[str, tuple[str, PlanReport]],
) -> None:
    lengths = table.lengths
    ours = reports["megapack"]
    num_dropped = ours.num_dropped_rollouts
    dropped = f"; {num_dropped} rollouts dropped" if num_dropped else ""
    print(
        f"{lengths.size} samples, {lengths.sum()} tokens ({table.columns}), the longest "
        f"{lengths.max()}, on {plan.layout.world_size} GPUs{dropped}"
    )
    heads = ["steps", "M", "rows", "fill", "padding", "imbalance", "bubble"]
    heads += ["seconds", "tokens/s/GPU"] if pricing.in_seconds else []
    columns = [
        Column("", lambda item: item[0]),
        *fact_columns(columns_named(*heads, "time/equal work"), lambda item: item[1]),
        Column("time/megapack", lambda item: f"{item[1].seconds / ours.seconds:.2f}"),
    ]
    print_columns(columns, reports.items())
    for name, (setting, report) in tuned.items():
        over = f", {report.num_rows_over} rows over the budget" if report.num_rows_over else ""
        print(f"{name} at {setting}: {report.seconds / ours.seconds:.2f}{over}")
    for line in ours.lines():
        print(line)
    if args.explain:
        print(args.parser.in_own_words(str(plan.explain())))
    print(f"time {pricing.basis}")
    print(f"{output_of(args)}: digest {plan.digest()[:12]}")
