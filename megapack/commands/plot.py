"""Draw a step of a plan: timelines with their bubbles, the fill of each row, the ranks' load."""

from __future__ import annotations

import argparse
from pathlib import Path

from megapack.base.files import write_output
from megapack.commands.arguments import check_output, integer, selected_steps
from megapack.commands.costs import add_costs, plan_pricing
from megapack.errors import ConfigError
from megapack.plan.file import read_plan

_FORMATS = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add PLAN, --step, and a cost model."""
    parser.add_argument("plan", metavar="PLAN", help="a plan.json, or the text of a plan")
    parser.add_argument(
        "-o", "--output", default="plan.png", metavar="FILE", help=".png, .svg or .pdf (plan.png)"
    )
    parser.add_argument("--step", type=integer, default=0, metavar="S", help="(0)")
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Draw and write."""
    suffix = Path(args.output).suffix
    if suffix not in _FORMATS:
        known = f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
        raise ConfigError(f"-o {args.output}: unknown kind of picture; name it {known}")
    check_output(args.output, args.plan)
    plan = read_plan(args.plan)
    (number,) = selected_steps(plan, args.step)
    pricing = plan_pricing(args, plan)
    # matplotlib and the simulator's compiler take a second to import: report bad input before.
    from megapack.outlook.stats import step_report
    from megapack.view.plot import draw_step
    from megapack.view.timeline import planned

    timeline = planned(plan, number, number, pricing.cost)
    report = step_report(plan, plan.steps[number], pricing.cost)
    unit = "seconds" if pricing.in_seconds else "token times"
    write_output(args.output, draw_step(timeline, report, unit, suffix[1:]))
    print(f"{args.output}: step {number} of {len(plan.steps)}")
    print(f"time {pricing.basis}")
    return 0
