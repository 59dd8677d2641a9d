"""The plan as data: steps, ranks, micro-batches; its invariants, forms and files.

Modules:
    microbatch: MicroBatch: the samples of one row
    plan: Plan and StepPlan; digest
    facts: Counts of steps, and the table of features that everything printed reads
    explanation: Explanation: what each planning option of a plan gains
    order: StepOrder: the operations of each stage, Megatron's or planned
    executor: choose_executor: what runs the steps of a policy
    check: check_plan: the invariants, numbered
    text: the text and JSON forms and their parsers
    show: grids and differences, for people
    file: plans read from and written to files
"""

from megapack.plan.check import check_plan
from megapack.plan.explanation import Explanation, Gain
from megapack.plan.facts import Counts
from megapack.plan.microbatch import MicroBatch, Part
from megapack.plan.order import Operation, StepOrder, chain_order, step_order
from megapack.plan.order_text import read_order
from megapack.plan.plan import Plan, RolloutId, StepPlan, own_samples

__all__ = [
    "Counts",
    "Explanation",
    "Gain",
    "MicroBatch",
    "Part",
    "Operation",
    "Plan",
    "RolloutId",
    "StepOrder",
    "StepPlan",
    "chain_order",
    "check_plan",
    "own_samples",
    "read_order",
    "step_order",
]
