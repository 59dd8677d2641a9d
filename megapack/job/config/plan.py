"""The config's sections `layout` and `plan`."""

from __future__ import annotations

import dataclasses

from megapack.base.choices import Calibrate
from megapack.config.bounds import at_least
from megapack.config.cost_file import read_cost
from megapack.cost.model import CostModel
from megapack.cost.stages import LayerSplit
from megapack.errors import ConfigError
from megapack.layout import Fp8, Layout, ParallelSizes
from megapack.policy import Policy, SharePrefixes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutConfig(LayerSplit, ParallelSizes):
    """How the ranks are split into parallel groups, the sizes of `megapack.Layout`, and how layers
    are split over pipeline stages, see `megapack.cost.stages`."""

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
    """Padded tokens that a micro-batch may have on one GPU, after context parallelism;
    null = count-based, by `micro_batch_size`."""
    micro_batch_size: int | None = None
    """Samples per micro-batch of a count-based plan; null = token-based."""
    global_batch_size: int | None = None
    """Rollouts per optimizer step; null = all rollouts of a batch in one step."""
    num_steps: int | None = None
    """Optimizer steps per batch, balanced by tokens; null = by `global_batch_size`."""
    forward_max_tokens_per_gpu: int | None = None
    """The budget of forward-only passes (log-probs), which may be larger because they keep no
    activations; null = `max_tokens_per_gpu`."""
    cost_model: str | None = None
    """YAML file of a cost model in seconds, written by tools/calibrate.py. Relative to the working
    directory; must be the same on all ranks. null = from the model's sizes, for a GPU of an assumed
    speed."""
    calibrate: Calibrate = "off"
    """"online": fit the cost model to the run's own seconds while it trains, plan with it, and
    write it to cost.yaml in the run's folder at the end. Plans then depend on measured times; a
    resumed run fits anew. "off": one model, which the run begins with."""
    calibrate_interval: int = 5
    """Optimizer steps from one fit of `calibrate` to the next."""


# A dataclass lists the fields of its last base first: so the sizes, of which one must be set, lead.
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Policy, _BatchSizes):
    """How samples become steps and micro-batches: sizes, then the fields of `megapack.Policy`."""

    share_prefixes: SharePrefixes = "auto"
    """"auto": a row holds the tokens that its samples have in common at their beginnings (such as
    the prompt of a group) once, where that pays; but not where Transformer Engine's ring runs over
    context-parallel ranks, since shared rows would gather the keys of all. "off": each sample has
    its own tokens."""

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

    def read_cost(self, layout: Layout) -> CostModel | None:
        """Read the file `cost_model`; None if it is not set, see `TrainConfig.cost_model`.

        Raises:
            ConfigError: see `cost_file.read_cost`.
        """
        return None if self.cost_model is None else read_cost(self.cost_model, layout)
