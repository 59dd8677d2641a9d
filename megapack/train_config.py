"""The configuration of the main job. `load_config(path, overrides, TrainConfig)` reads it.

Sections are named as in YAML: `layout`, `plan`, `model`, `data`, `objective`, `optim`, `train`,
`watchdog`.
Each field says under it what it means, in which unit, and what null means.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from megapack.choices import Device
from megapack.cost import CostModel
from megapack.cost_file import read_cost
from megapack.errors import ConfigError
from megapack.layout import Fp8, Layout, ParallelSizes, why_no_retry
from megapack.loop_config import LoopConfig, WatchdogConfig
from megapack.memory import MemoryModel
from megapack.model_config import (
    BYTE_VOCAB_SIZE,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    at_least,
)
from megapack.policy import (
    Policy,
)

__all__ = [
    "TrainConfig",
    "LayoutConfig",
    "PlanConfig",
    "ModelConfig",
    "DataConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "LoopConfig",
    "WatchdogConfig",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutConfig(ParallelSizes):
    """How the ranks are split: the sizes of `megapack.Layout`."""

    def __post_init__(self) -> None:
        at_least(self, "layout", 1, "tp", "pp", "vpp", "cp", "ep", "dp", "microbatch_group_size")

    def to_layout(self, world_size: int, fp8: Fp8 = False) -> Layout:
        """The layout of a job of `world_size` ranks.

        Args:
            fp8: the model's `fp8_rows`, for which rows are aligned.

        Raises:
            ConfigError: the ranks do not fill it.
        """
        model_ranks = self.tp * self.pp * self.cp
        dp = self.dp if self.dp is not None else max(1, world_size // model_ranks)
        if dp * model_ranks != world_size:
            raise ConfigError(
                f"layout needs dp * tp * pp * cp = {dp} * {self.tp} * {self.pp} * {self.cp} = "
                f"{dp * model_ranks} ranks, the job has {world_size}; start {dp * model_ranks}, "
                "or change layout"
            )
        return Layout(**{**dataclasses.asdict(self), "dp": dp, "fp8": fp8})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _BatchSizes:
    """Sizes of micro-batches and steps, and what a micro-batch costs."""

    max_tokens_per_gpu: int | None = None
    """Padded tokens that a micro-batch may have on one GPU, after context parallelism;
    null = count-based, by `micro_batch_size`."""
    micro_batch_size: int | None = None
    """Samples per micro-batch of a count-based plan; null = token-based."""
    global_batch_size: int | None = None
    """Rollouts per optimizer step; null = all rollouts of a batch in one step."""
    num_steps: int | None = None
    """Optimizer steps per batch, balanced by tokens; null = as `global_batch_size` gives."""
    forward_max_tokens_per_gpu: int | None = None
    """The budget of forward-only passes (log-probs), which store no activations and so may take
    more; null = `max_tokens_per_gpu`."""
    cost_model: str | None = None
    """YAML file of a cost model in seconds, as tools/calibrate.py writes it, relative to the
    working directory; the same on all ranks. null = a row costs its tokens."""


# The fields of the last base come first: what must be set leads the section.
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Policy, _BatchSizes):
    """How samples become steps and micro-batches: sizes, then the fields of `megapack.Policy`."""

    def __post_init__(self) -> None:
        sizes = ("max_tokens_per_gpu", "micro_batch_size", "global_batch_size", "num_steps")
        at_least(self, "plan", 1, *sizes, "forward_max_tokens_per_gpu", "max_live_tokens_per_gpu")
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
        """The cost model that is named; None where a row costs its tokens.

        Raises:
            ConfigError: see `cost_file.read_cost`.
        """
        return None if self.cost_model is None else read_cost(self.cost_model, layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Adam and its learning-rate schedule, counted in optimizer steps."""

    lr: float = 1e-5
    """The highest learning rate."""
    min_lr: float = 0.0
    """What the learning rate decays to."""
    warmup_steps: int = 0
    """Optimizer steps in which the rate rises linearly from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """The rate's way from `lr` to `min_lr` over the steps after the warm-up."""
    weight_decay: float = 0.01
    """Decoupled weight decay; not on biases and norms."""
    adam_beta1: float = 0.9
    """Decay of the first moment, in [0, 1)."""
    adam_beta2: float = 0.95
    """Decay of the second moment, in [0, 1)."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad: float = 1.0
    """Gradients are scaled down to this global norm; 0 = no clipping."""
    distributed_optimizer: bool = False
    """Split the optimizer's state over the data-parallel ranks."""

    def __post_init__(self) -> None:
        at_least(self, "optim", 0, "lr", "min_lr", "warmup_steps", "weight_decay", "clip_grad")
        at_least(self, "optim", 0, "adam_beta1", "adam_beta2", "adam_eps")
        if max(self.adam_beta1, self.adam_beta2) >= 1:
            raise ConfigError(
                f"optim.adam_beta1={self.adam_beta1} and optim.adam_beta2={self.adam_beta2} must "
                "be below 1; set 0.9 and 0.95"
            )
        if self.min_lr > self.lr:
            raise ConfigError(
                f"optim.min_lr={self.min_lr} is above optim.lr={self.lr}; set it to {self.lr} or "
                "less"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that a run depends on; written to the run's folder as it was resolved."""

    name: str
    """The run's name and its folder under `runs_dir`."""
    device: Device = "cuda"
    """cpu sends Megatron-Core's CUDA calls to the CPU; never chosen by itself."""
    seed: int = 1234
    """Seeds the weights, dropout, and the order of shuffled data."""
    runs_dir: str = "runs"
    """Where run folders go; relative to the working directory."""
    layout: LayoutConfig = dataclasses.field(default_factory=LayoutConfig)
    """Ranks."""
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
    """Packing. A budget or a micro-batch size must be set: it is what fits into memory."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    """The GPT."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """Rollouts."""
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    """The loss."""
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    """The optimizer."""
    train: LoopConfig = dataclasses.field(default_factory=LoopConfig)
    """The loop."""
    watchdog: WatchdogConfig = dataclasses.field(default_factory=WatchdogConfig)
    """Steps that are late."""

    def __post_init__(self) -> None:
        at_least(self, "", 0, "seed")
        if self.name in ("", ".", "..") or any(c in self.name for c in "/\\\0\n"):
            raise ConfigError(f"name is {self.name!r}; set a folder's name, without / in it")
        self._check_division()
        self._check_retry()
        vocabulary, needed = self.model.vocab_size, BYTE_VOCAB_SIZE
        if self.data.path is None and vocabulary is not None and vocabulary < needed:
            raise ConfigError(
                f"model.vocab_size={vocabulary} is less than the {needed} of generated rollouts; "
                f"set {needed} or more, or data.path"
            )
        longest, positions = self.data.max_length, self.model.max_position_embeddings
        if longest is not None and longest > positions:
            raise ConfigError(
                f"data.max_length={longest} is above model.max_position_embeddings={positions}; "
                f"set it to {positions} or less"
            )

    @property
    def longest_sample(self) -> int:
        """Tokens that a sample may have, prompt and response."""
        return self.data.max_length or self.model.max_position_embeddings

    def memory_model(self) -> MemoryModel:
        """What of this decides the bytes of a GPU."""
        return MemoryModel(
            sizes=self.model.to_sizes(),
            untied_embeddings=self.model.untie_embeddings,
            dtype=self.model.dtype,
            distributed_optimizer=self.optim.distributed_optimizer,
            recompute=self.model.recompute,
            logprob_chunk_tokens=self.objective.logprob_chunk_tokens,
        )

    def _check_division(self) -> None:
        """What the layout must divide; nothing of this may first fail on a cluster."""
        layout, model = self.layout, self.model
        chunks = layout.pp * layout.vpp
        if model.num_layers % chunks:
            raise ConfigError(
                f"model.num_layers={model.num_layers} does not divide over pp * vpp = {chunks} "
                f"chunks; set a multiple of {chunks}"
            )
        for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
            value = getattr(model, name)
            if value is not None and value % layout.tp:
                raise ConfigError(
                    f"model.{name}={value} does not divide over layout.tp={layout.tp}; set a "
                    f"multiple of {layout.tp}"
                )
        if (model.num_experts or 1) % layout.ep:
            raise ConfigError(
                f"model.num_experts={model.num_experts} does not divide over layout.ep="
                f"{layout.ep}; set a multiple of {layout.ep}"
            )
        if model.num_experts and layout.tp > 1 and not layout.sequence_parallel:
            raise ConfigError(
                f"model.num_experts={model.num_experts} with layout.tp={layout.tp} needs "
                "layout.sequence_parallel=true: Megatron routes each token on one rank; set it"
            )
        if layout.sequence_parallel and layout.tp == 1:
            raise ConfigError("layout.sequence_parallel needs layout.tp > 1; set it to false")

    def _check_retry(self) -> None:
        reason = why_no_retry(tp=self.layout.tp, cp=self.layout.cp, ep=self.layout.ep)
        if self.train.on_oom == "replan" and reason:
            raise ConfigError(f"train.on_oom=replan with layout.{reason}; set train.on_oom=error")
