"""One batch of the main job: its samples, and the plans that every rank finds alike.

rows of the data -> BatchPlanner -> PlannedBatch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megapack.batch_plan import plan_logprobs, plan_steps
from megapack.cost import CostModel
from megapack.dataset import Dataset, Rows
from megapack.layout import Layout
from megapack.plan import Plan
from megapack.samples import SampleBatch
from megapack.train_config import PlanConfig


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """Samples of the data, and what is made of them."""

    rows: Rows
    """Numbers of the samples in the data."""
    samples: SampleBatch
    """Lengths and fields of all of them; tokens of those that this rank packs."""
    plan: Plan
    """The optimizer steps."""
    forward_plan: Plan
    """Of passes for log-probs; `plan` where these take the steps' own rows."""


@dataclass(frozen=True)
class BatchPlanner:
    """Plans batches of the data.

    Args:
        cost: what a row costs; None for its tokens.
        dp_rank: the data-parallel rank that this process runs.
    """

    config: PlanConfig
    layout: Layout
    cost: CostModel | None
    data: Dataset
    dp_rank: int

    def plan(self, rows: Rows, fields: Mapping[str, Sequence[Any]]) -> PlannedBatch:
        """The samples at these rows of the data as a batch; local work.

        Args:
            fields: see `SampleBatch`; one value per row of the data.

        Raises:
            PlanError, ConfigError: no legal plan serves their lengths.
            DataError: as `Dataset.tokens` does.
        """
        samples = SampleBatch.from_lengths(
            self.data.prompt_tokens(rows), self.data.response_tokens(rows), fields
        )
        lengths, ids = samples.lengths, self.data.rollout_ids(rows)
        plan = plan_steps(self.config, self.layout, self.cost, lengths, ids)
        forward_plan = plan_logprobs(self.config, self.layout, self.cost, lengths) or plan
        self.data.give_tokens(samples, rows, (plan, forward_plan), self.dp_rank)
        return PlannedBatch(rows=rows, samples=samples, plan=plan, forward_plan=forward_plan)
