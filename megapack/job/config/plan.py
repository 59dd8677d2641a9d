"""The config's sections `layout` and `plan`."""

from __future__ import annotations

import dataclasses

from megapack.base.choices import Calibrate
from megapack.config.bounds import at_least
from megapack.cost.stages import LayerSplit
from megapack.errors import ConfigError
from megapack.layout import Fp8, Layout, ParallelSizes
from megapack.policy import Policy, SharePrefixes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutConfig(LayerSplit, ParallelSizes):
    """How ranks are split into parallel groups, and layers over pipeline stages."""

    def __post_init__(self) -> None:
        sizes = ("dp", "tp", "pp", "vpp", "cp", "ep", "etp")
        at_least(self, "layout", 1, *sizes, "microbatch_group_size")

    def to_layout(self, world_size: int, fp8: Fp8 = False) -> Layout:
        """The layout of a job of `world_size` ranks.

        Args:
            fp8: the model's `fp8_rows`; it decides the alignment of rows.

        Raises:
            ConfigError: `world_size` is not dp * tp * pp * cp.
        """
        model_ranks = self.tp * self.pp * self.cp
        dp = self.dp if self.dp is not None else max(1, world_size // model_ranks)
        if dp * model_ranks != world_size:
            raise ConfigError(
                f"layout needs dp * tp * pp * cp = {dp} * {self.tp} * {self.pp} * {self.cp} = "
                f"{dp * model_ranks} ranks, the job has {world_size}; start {dp * model_ranks}, "
                "or change layout"
            )
        sizes = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(ParallelSizes)
        }
        return Layout(**{**sizes, "dp": dp, "fp8": fp8})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _BatchSizes:
    """Sizes of micro-batches and steps, and the cost model."""

    max_tokens_per_gpu: int | None = None
    """Budget: padded tokens of a micro-batch on one GPU, after context parallelism. Set this or
    `micro_batch_size`."""
    micro_batch_size: int | None = None
    """Samples per micro-batch, in place of a budget."""
    global_batch_size: int | None = None
    """Rollouts per optimizer step; null = a whole batch."""
    num_steps: int | None = None
    """Optimizer steps per batch, balanced by tokens, in place of `global_batch_size`."""
    forward_max_tokens_per_gpu: int | None = None
    """Budget of forward-only passes (log-probs), which may be larger; null =
    `max_tokens_per_gpu`."""
    cost_model: str | None = None
    """A cost model's YAML file, from tools/calibrate.py, equal on all ranks. null = from the
    model's sizes."""
    calibrate: Calibrate = "auto"
    """start: without a `cost_model`, measure the speeds of attention, products and the head when
    the run starts. online: fit the cost model to the run's own seconds, and plan with it. Plans
    then depend on measured times. auto: start on a GPU, off on a CPU."""
    calibrate_interval: int = 5
    """Optimizer steps between fits of `calibrate`."""


# A dataclass lists the fields of its last base first: so the sizes, of which one must be set, lead.
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Policy, _BatchSizes):
    """How samples become steps and micro-batches. From `count_rule` on: `megapack.Policy`."""

    share_prefixes: SharePrefixes = "auto"
    """auto: a row holds a prefix that samples have in common once, where that pays; not where
    Transformer Engine's ring runs over several ranks."""

    def __post_init__(self) -> None:
        sizes = ("max_tokens_per_gpu", "micro_batch_size", "global_batch_size", "num_steps")
        at_least(self, "plan", 1, *sizes, "forward_max_tokens_per_gpu", "max_live_tokens_per_gpu")
        at_least(self, "plan", 1, "calibrate_interval")
        at_least(self, "plan", 0, "search")
        if (self.max_tokens_per_gpu is None) == (self.micro_batch_size is None):
            both = "neither" if self.max_tokens_per_gpu is None else "both"
            raise ConfigError(
                f"{both} of plan.max_tokens_per_gpu and plan.micro_batch_size set; set one"
            )
        if self.global_batch_size is not None and self.num_steps is not None:
            raise ConfigError("both of plan.global_batch_size and plan.num_steps set; unset one")
        super().__post_init__()

    def to_policy(self) -> Policy:
        """The planner's policy, without the sizes."""
        names = [field.name for field in dataclasses.fields(Policy)]
        return Policy(**{name: getattr(self, name) for name in names})
