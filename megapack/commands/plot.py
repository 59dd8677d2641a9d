"""Draw a step of a plan: the pipelines of its ranks, with their bubbles."""

from __future__ import annotations

import argparse
from pathlib import Path

from megapack.commands.arguments import add_output, add_plan, add_step, check_output, write_result
from megapack.commands.costs import add_costs, priced_plan
from megapack.commands.parser import Parser
from megapack.errors import ConfigError
from megapack.plan.facts import features_of

EXAMPLE = "megapack plot plan.json --step 0 -o step.png"
_KINDS = ".png, .svg or .pdf"


def add_arguments(parser: Parser) -> None:
    """Add PLAN, --step, and a cost model."""
    add_plan(parser)
    add_output(parser, "plan.png", f"a {_KINDS}")
    add_step(parser, 0)
    add_costs(parser)


def run(args: argparse.Namespace) -> int:
    """Draw and write."""
    output = check_output(args, args.plan)
    suffix = Path(output).suffix
    if suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"-o {output}: unknown kind of picture; name it {_KINDS}")
    plan, (number,), pricing = priced_plan(args, args.plan)
    # matplotlib and the simulator's compiler take a second to import: report bad input before.
    from megapack.job.view.page import typical_step
    from megapack.job.view.plot import draw_steps
    from megapack.job.view.timeline import planned
    from megapack.outlook.stats import step_report

    step = typical_step([planned(plan, number, number, pricing.cost)])
    report = step_report(plan, plan.steps[number], pricing.cost)
    heading = [
        f"step {number} of plan {plan.digest()[:12]}: {plan.layout.label}, "
        f"M={report.microbatch_span}, bubble {report.bubble_fraction:.1%}",
        *(feature.line(report) for feature in features_of(report)),
    ]
    unit = "seconds" if pricing.in_seconds else "token times"
    write_result(args, draw_steps({step["label"]: step}, unit, suffix[1:], "\n".join(heading)))
    print(f"{output}: step {number} of {len(plan.steps)}")
    print(f"time {pricing.basis}")
    return 0
