"""Compiles the planner, so that no test's time limit includes it: a minute on a new machine.

python -m tests.gpu.compile_planner
"""

from __future__ import annotations

from megapack import CostModel, Layout, build_dp_schedule, simulate
from tests.gpu import problem


def main() -> None:
    """Make the plans of the tests, and plan in seconds as the benchmark does."""
    lengths = problem.make_batch().lengths
    for layout in (Layout(), Layout(pp=2), Layout(pp=2, vpp=2)):
        problem.make_plan(layout)
        cost = CostModel(fixed=1e-3, per_token=1e-6, per_token_sq=1e-10)
        plan = build_dp_schedule(
            lengths, layout=layout, max_tokens_per_gpu=problem.BUDGET, cost=cost
        )
        simulate(plan.steps[0], layout=layout, cost=cost)
    problem.shared_plan(Layout())
    problem.split_plan(Layout())


if __name__ == "__main__":
    main()
