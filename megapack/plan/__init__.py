"""The plan as data: steps, ranks, micro-batches; its invariants, texts and files.

plan    Plan, StepPlan, MicroBatch; JSON and digest
check   check_plan: the invariants, numbered
text    the text form and its inverse
show    grids and differences, for people
"""

from megapack.plan.check import check_plan
from megapack.plan.plan import MicroBatch, Plan, RolloutId, StepPlan

__all__ = [
    "MicroBatch",
    "Plan",
    "RolloutId",
    "StepPlan",
    "check_plan",
]
