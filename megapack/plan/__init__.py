"""The plan as data: steps, ranks, micro-batches; its invariants, forms and files.

Modules:
    microbatch: MicroBatch: the samples of one row
    images: PlannedImage: an image of a step, the GPU that encodes it, the samples that use it
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

from megapack.plan.check import check_plan as check_plan
from megapack.plan.explanation import Explanation as Explanation
from megapack.plan.explanation import Gain as Gain
from megapack.plan.facts import Counts as Counts
from megapack.plan.microbatch import MicroBatch as MicroBatch
from megapack.plan.microbatch import Part as Part
from megapack.plan.order import Operation as Operation
from megapack.plan.order import StepOrder as StepOrder
from megapack.plan.order import chain_order as chain_order
from megapack.plan.order import step_order as step_order
from megapack.plan.order_text import read_order as read_order
from megapack.plan.plan import Plan as Plan
from megapack.plan.plan import RolloutId as RolloutId
from megapack.plan.plan import StepPlan as StepPlan
from megapack.plan.plan import own_samples as own_samples
