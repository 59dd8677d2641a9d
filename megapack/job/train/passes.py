"""The main job's passes over a batch: log-probs before its steps, gradients in each step.

    sample numbers -> BatchPlanner -> PlannedBatch -> BatchPasses -> gradients in the model

The reference policy is a copy of the initial weights or of a folder's; its log-probs are what the
KL penalty compares with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from megapack.base.choices import RoutingReplay
from megapack.cost.model import CostModel
from megapack.errors import DataError
from megapack.job.config.objective import ObjectiveConfig
from megapack.job.config.sections import PlanConfig
from megapack.job.data.batches import batch_prefixes, plan_logprobs, plan_steps
from megapack.job.data.dataset import Dataset, SampleNumbers
from megapack.job.data.rollouts import TOKEN_COLUMNS
from megapack.job.hf.load import load_hf_weights
from megapack.layout import Layout
from megapack.loss.correction import Correction
from megapack.loss.distillation import Distillation
from megapack.loss.preference import DPO, PairwiseReward
from megapack.loss.sequence import GSPO
from megapack.loss.token import GRPO, PPO, SFT, Objective
from megapack.model.overlap import finish_param_gathers
from megapack.plan.plan import Plan, own_samples
from megapack.rows.transfer import host_copies, host_like
from megapack.samples import SampleBatch
from megapack.schedule.adapter import ScheduleAdapter, StepResult
from megapack.schedule.ahead import Ahead

# Ids are labels, which the head gathers by.
_COLUMN_DTYPES = {
    name: torch.int64 if name.endswith("_ids") else torch.float32 for name in TOKEN_COLUMNS
}
# Steps move this buffer without a gradient, so it is part of the policy like a parameter.
_BIAS = "router.expert_bias"


class Reference:
    """A copy of the model's current weights on the CPU, in pinned memory if the model is on CUDA.

    Args:
        load: gives the model the reference's weights, of which the copy is then; the current ones
            are put back.

    Attributes:
        initial: the copied value of each parameter and expert bias.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], load: Callable[[], object] | None = None
    ) -> None:
        self._chunks = chunks
        params: list[torch.Tensor] = [p for chunk in chunks for p in chunk.parameters()]
        params += [b for chunk in chunks for n, b in chunk.named_buffers() if n.endswith(_BIAS)]
        finish_param_gathers(chunks)
        self.initial = dict(zip(params, host_copies(params), strict=True))
        self._trained: dict[torch.Tensor, torch.Tensor] = {}
        if load is not None:
            current = self.initial
            load()
            self.initial = dict(zip(params, host_copies(params), strict=True))
            self._fill(current)

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Give the model its initial weights within the block. A collective.

        The trained weights wait in CPU memory, which is allocated once. A second copy on the GPU
        would come on top of gradients and optimizer state.
        """
        finish_param_gathers(self._chunks)
        if not self._trained:
            self._trained = {param: host_like(param) for param in self.initial}
        # The host waits for none of the copies: all of them run in the order of one stream.
        for param, trained in self._trained.items():
            trained.copy_(param.detach(), non_blocking=True)
        self._fill(self.initial)
        try:
            yield
        finally:
            self._fill(self._trained)

    def _fill(self, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        for param, value in values.items():
            param.data.copy_(value, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """A batch of samples and its plans."""

    numbers: SampleNumbers
    """Numbers of the samples in the data set."""
    samples: SampleBatch
    """Lengths and fields of all samples; tokens of those that this rank packs."""
    plan: Plan
    """The optimizer steps."""
    forward_plan: Plan
    """Plan of the log-prob passes; the same as `plan` if these use the rows of the steps."""
    cost: CostModel
    """The cost model that the batch was planned with."""
    routing: list[torch.Tensor | None]
    """Per sample the experts to replay in the policy, [tokens, MoE layers, experts per token]; None
    for samples that this rank does not pack, or that no pass has recorded so far."""


@dataclass(frozen=True)
class BatchPlanner:
    """Plans batches of the data.

    Args:
        cost: what a row costs.
        dp_rank: this process's data-parallel rank.
        replays_rollouts: read `routed_experts` of the data.
        mtp_num_layers: layers of multi-token prediction of the model.
        token_columns: columns of the data that become fields of the batch.
    """

    config: PlanConfig
    layout: Layout
    cost: CostModel
    data: Dataset
    dp_rank: int
    replays_rollouts: bool = False
    mtp_num_layers: int = 0
    token_columns: tuple[str, ...] = ()
    ahead: Ahead | None = None
    """Makes pixels of this rank's images; None: samples have none."""
    has_logprobs: bool = False
    """Whether log-prob passes come before the steps."""

    def plan(self, numbers: SampleNumbers, fields: Mapping[str, Sequence[Any]]) -> PlannedBatch:
        """Plan a batch of these samples and read this rank's tokens; local work.

        Args:
            numbers: the samples' numbers in the data set.
            fields: see `SampleBatch`; one value per sample.

        Raises:
            PlanError, ConfigError: there is no legal plan for their lengths.
        """
        images = self.data.images(numbers)
        samples = SampleBatch.from_lengths(
            self.data.prompt_tokens(numbers),
            self.data.response_tokens(numbers),
            fields,
            loss_tokens=self.data.loss_tokens(numbers),
            images=images,
        )
        lengths = samples.lengths
        rollout_ids = self.data.rollout_ids(numbers)
        pair_ids = self.data.pair_ids(numbers)
        prefixes = batch_prefixes(
            self.config,
            self.data,
            numbers,
            mtp_num_layers=self.mtp_num_layers,
            replays_routes=self.replays_rollouts,
        )
        settings = (self.config, self.layout, self.cost, lengths)
        plan = plan_steps(*settings, rollout_ids, pair_ids, prefixes, images)
        forward_plan = plan_logprobs(*settings, prefixes, images)
        batch = PlannedBatch(
            numbers=numbers,
            samples=samples,
            plan=plan,
            forward_plan=forward_plan or plan,
            cost=self.cost,
            routing=[None] * len(lengths),
        )
        self._give(batch)
        if self.ahead is not None and samples.has_images:
            first = batch.forward_plan if self.has_logprobs else plan
            for step in first.steps[:1]:
                self.ahead.prefetch(step, samples)
        return batch

    def _give(self, batch: PlannedBatch) -> None:
        """Give a batch the tokens, columns and routes that this rank packs under its plans.

        Raises:
            DataError: routes are to be replayed and a sample has none.
        """
        numbers = batch.numbers
        plans = (batch.plan, batch.forward_plan)
        self.data.give_tokens(batch.samples, numbers, plans, self.dp_rank)
        for name in self.token_columns:
            self._give_column(name, batch, own_samples(plans, self.dp_rank))
        if not self.replays_rollouts:
            return
        for sample in own_samples(plans, self.dp_rank):
            routes = self.data.tokens(int(numbers[sample])).routed_experts
            if routes is None:
                ((file, line, _),) = self.data.lines(numbers[sample : sample + 1])
                raise DataError(
                    f"data.path, file {file + 1}, line {line}: the sample has no `routed_experts`, "
                    "which train.routing_replay=rollout repeats; give them, or set it to none or "
                    "old_logprobs"
                )
            batch.routing[sample] = torch.from_numpy(routes.astype(np.int32))

    def _give_column(self, name: str, batch: PlannedBatch, own: Iterable[int]) -> None:
        """Set a column of those samples; the others get a number."""
        samples = batch.samples
        values = [torch.zeros((), dtype=_COLUMN_DTYPES[name])] * len(samples)
        for sample in own:
            stored = self.data.token_column(name, int(batch.numbers[sample]))
            # A copy: what is mapped cannot be written, which torch warns of.
            values[sample] = torch.from_numpy(stored.copy()).to(_COLUMN_DTYPES[name])
        samples.set_field(name, values)


T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class BatchPasses:
    """Runs the passes that the objective needs. All methods that run passes are collectives.

    Attributes:
        reference: the reference policy; None if it is not needed.
    """

    config: ObjectiveConfig
    """Names the objective. If it needs a reference policy, the adapter's current weights become
    that."""
    adapter: ScheduleAdapter
    """Runs the model."""
    optimizer: Any
    """Megatron's; only its gradients are touched."""
    objective: Objective
    """The training objective."""
    is_critic: bool = False
    """Whether it trains another model than the policy, without a reference."""
    routing_replay: RoutingReplay = "none"
    """See `LoopConfig`, like `entropy_interval`."""
    entropy_interval: int
    device: torch.device
    """See `agree`."""

    def __post_init__(self) -> None:
        self.reference: Reference | None = None
        if self.config.has_reference and not self.is_critic:
            folder = self.config.reference_hf_path
            modules = self.adapter.modules
            load = functools.partial(load_hf_weights, modules, folder or "", device=self.device)
            self.reference = Reference(modules, load if folder is not None else None)

    @property
    def logprob_fields(self) -> list[str]:
        """Fields of a batch that `add_logprobs` fills in."""
        names = ["old_logprobs"]
        read = [*self.objective.required_fields]
        if self.reference is not None:
            names.append("ref_logprobs")
        if self.config.kl_in_reward_coef:
            read.append("ref_logprobs")
        return [name for name in names if name in read]

    def add_logprobs(self, batch: PlannedBatch) -> None:
        """Fill in the log-probs that the objective reads, and the routes that its steps replay."""
        names = self.logprob_fields
        samples = batch.samples
        if "old_logprobs" in names:
            samples.set_field("old_logprobs", self.outputs(batch, "logprobs", of_policy=True))
        if self.reference is not None and "ref_logprobs" in names:
            with self.reference.weights():
                samples.set_field("ref_logprobs", self.outputs(batch, "logprobs"))

    def outputs(
        self, batch: PlannedBatch, name: str, *, of_policy: bool = False
    ) -> list[torch.Tensor]:
        """An output of `ScheduleAdapter.forward`: "logprobs", or "values" of a value head.

        Args:
            of_policy: replay or record routes as `routing_replay` says. The reference and a critic
                choose their own experts.

        Returns:
            Per sample one value per token; a single 0 for samples that the plan drops.
        """
        plan = batch.forward_plan
        merged = [torch.zeros(())] * len(batch.samples)
        replay = self.routing_replay if of_policy else "none"
        for index in range(len(plan.steps)):
            found = self.adapter.forward(
                plan,
                batch.samples,
                step=index,
                routing=batch.routing if replay == "rollout" else None,
                record_routing=replay == "old_logprobs",
                # Routes are large: 48 layers of 8 experts are 384 bytes a token.
                routing_scope="dp_rank",
            )
            merged = _updated(merged, found[name])
            if replay == "old_logprobs":
                batch.routing[:] = _updated(batch.routing, found["routing"])
        return merged

    def gradients(
        self, batch: PlannedBatch, index: int, *, num_steps: int
    ) -> tuple[StepResult, float]:
        """Zero the gradients, then run forward and backward of a step.

        Args:
            index: the step within the batch.
            num_steps: optimizer steps of the run before this one.

        Returns:
            The result, and the seconds that both took.

        Raises:
            ScheduleError, RankError: as `ScheduleAdapter.step` does.
        """
        started = time.perf_counter()
        for module in self.adapter.modules:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        plan = batch.plan
        result = self.adapter.step(
            plan,
            batch.samples,
            objective=self.objective,
            step=index,
            weighting=self.config.loss_weighting,
            norm_constant=self.config.norm_constant,
            entropy=self._reports_entropy(num_steps),
            routing=None if self.routing_replay == "none" else batch.routing,
            next_step=index + 1 if index + 1 < len(plan.steps) else None,
            next_entropy=self._reports_entropy(num_steps + 1),
        )
        torch.cuda.synchronize()
        return result, time.perf_counter() - started

    def _reports_entropy(self, num_steps: int) -> bool:
        interval = self.entropy_interval
        return interval > 0 and num_steps % interval == 0


def _updated(old: Sequence[T], new: Sequence[torch.Tensor | None]) -> list[T | torch.Tensor]:
    """The new values where there are some, else the old ones."""
    return [before if after is None else after for before, after in zip(old, new, strict=True)]


_OBJECTIVES: dict[str, Any] = {
    "sft": SFT,
    "dpo": DPO,
    "reward": PairwiseReward,
    "distill": Distillation,
    "ppo": PPO,
    "grpo": GRPO,
    "gspo": GSPO,
}


def make_objective(config: ObjectiveConfig) -> Objective:
    """The objective that a config names."""
    cls = _OBJECTIVES[config.kind]
    given: dict[str, Any] = {}
    if issubclass(cls, PPO):
        kind = config.correction
        given["correction"] = kind and _filled(Correction, config, "correction_", kind=kind)
    objective: Objective = _filled(cls, config, f"{config.kind}_", **given)
    return objective


def _filled(cls: Any, config: ObjectiveConfig, prefix: str, **given: Any) -> Any:
    """A dataclass with a config's values: its field `beta` has that of `dpo_beta`, or of `beta`.

    Fields without such a key keep their defaults.
    """
    for field in dataclasses.fields(cls):
        keys = [key for key in (prefix + field.name, field.name) if hasattr(config, key)]
        if keys:
            given.setdefault(field.name, getattr(config, keys[0]))
    return cls(**given)
