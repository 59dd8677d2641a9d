"""A step once more, in rows of half the size: what the main job does about a GPU out of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megapack.batch_plan import plan_logprobs, plan_steps
from megapack.cost import CostModel
from megapack.dataset import Dataset, Rows
from megapack.errors import StepOutOfMemory
from megapack.layout import Layout
from megapack.plan import Plan, StepPlan
from megapack.samples import SampleBatch
from megapack.train_config import PlanConfig


@dataclasses.dataclass(frozen=True)
class Replanner:
    """Plans anew what did not fit; every rank finds the same."""

    config: PlanConfig
    layout: Layout
    cost: CostModel | None
    data: Dataset
    dp_rank: int

    def step(
        self, rows: Rows, batch: SampleBatch, plan: Plan, index: int
    ) -> tuple[SampleBatch, Plan]:
        """The samples of one step as a batch of their own, and its plan of one step.

        Args:
            rows: numbers of the batch's samples in the data.
            batch, plan, index: what ran out of memory.

        Raises:
            StepOutOfMemory: every row holds one sample already.
            PlanError, ConfigError: no plan has such rows.
        """
        kept = plan.steps[index].kept_samples
        own = rows[list(kept)]
        fields = {n: [batch.field(n, i) for i in kept] for n in batch.field_names}
        smaller = SampleBatch.from_lengths(
            self.data.prompt_tokens(own), self.data.response_tokens(own), fields
        )
        # The step keeps what it kept, also where half of it would not be reachable by splitting.
        config = dataclasses.replace(
            halved(self.config, (plan.steps[index],)),
            global_batch_size=None,
            num_steps=None,
            unreachable="pad",
            oversize="alone",
        )
        ids = self.data.rollout_ids(own)
        planned = plan_steps(config, self.layout, self.cost, smaller.lengths, ids)
        self.data.give_tokens(smaller, own, (planned,), self.dp_rank)
        return smaller, planned

    def logprobs(self, rows: Rows, batch: SampleBatch, plan: Plan) -> Plan:
        """One pass over the whole batch in place of what `plan` has.

        Raises:
            StepOutOfMemory, PlanError, ConfigError: as `step` does.
        """
        config = halved(self.config, plan.steps)
        planned = plan_logprobs(config, self.layout, self.cost, batch.lengths)
        if planned is None:
            # Count-based: the rows of one step with all samples.
            one_step = dataclasses.replace(config, global_batch_size=None, num_steps=None)
            ids = self.data.rollout_ids(rows)
            planned = plan_steps(one_step, self.layout, self.cost, batch.lengths, ids)
        self.data.give_tokens(batch, rows, (planned,), self.dp_rank)
        return planned


def halved(config: PlanConfig, steps: Sequence[StepPlan]) -> PlanConfig:
    """The settings with half of the largest row of these steps as the budget.

    Raises:
        StepOutOfMemory: every row holds one sample already; every rank finds the same.
    """
    microbatches = [mb for step in steps for rank in step.ranks for mb in rank]
    tokens = max(mb.padded_tokens for mb in microbatches)
    num_samples = max(len(mb.samples) for mb in microbatches)
    if num_samples < 2:
        raise StepOutOfMemory(
            f"a GPU ran out of memory though each row holds one sample, of up to {tokens} padded "
            "tokens; set data.max_length, model.recompute, or a layout with more stages"
        )
    if config.max_tokens_per_gpu is None:
        return dataclasses.replace(config, micro_batch_size=num_samples // 2)
    budget = max(tokens // 2, 1)
    return dataclasses.replace(config, max_tokens_per_gpu=budget, forward_max_tokens_per_gpu=budget)
