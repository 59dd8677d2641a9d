"""The main job's config, `TrainConfig`. `load_config(path, overrides, TrainConfig)` reads it.

Its sections in YAML are `layout`, `plan`, `model`, `data`, `objective`, `critic`, `optim`,
`train` and `watchdog`. The docstring under each field gives its meaning, its unit and the meaning
of null.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Literal

from megapack.base.choices import (
    Calibrate,
    Device,
    Executor,
    ExecutorChoice,
    Kernel,
    RoutingReplay,
)
from megapack.config.cost_file import read_cost
from megapack.config.critic import CriticConfig
from megapack.config.data import DataConfig
from megapack.config.model import ModelConfig
from megapack.config.model_checks import at_least
from megapack.config.objective import ObjectiveConfig
from megapack.config.run_checks import check_run
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.memory import MemoryModel
from megapack.cost.model import CostModel
from megapack.cost.stages import LayerSplit, StageLayers
from megapack.errors import ConfigError
from megapack.layout import Fp8, Layout, ParallelSizes
from megapack.plan.executor import choose_executor
from megapack.policy import Policy, SharePrefixes

__all__ = [
    "TrainConfig",
    "LayoutConfig",
    "PlanConfig",
    "ModelConfig",
    "DataConfig",
    "ObjectiveConfig",
    "CriticConfig",
    "OptimConfig",
    "LoopConfig",
    "WatchdogConfig",
]


# A token of `generate_lengths` up to 16,384 tokens is on average in a sample of 3,800 tokens.
_LONGEST_OVER_TYPICAL = 4


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
    speed; `balance: tokens` balances by tokens."""
    calibrate: Calibrate = "off"
    """"online": fit the cost model to the run's own seconds while it trains, and plan with it.
    Plans then depend on measured times; checkpoints keep the model. "off": one model, which the run
    begins with."""
    calibrate_interval: int = 5
    """Optimizer steps from one fit of `calibrate` to the next."""


# A dataclass lists the fields of its last base first: so the sizes, of which one must be set, lead.
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Policy, _BatchSizes):
    """How samples become steps and micro-batches: sizes, then the fields of `megapack.Policy`."""

    share_prefixes: SharePrefixes = "auto"
    """"auto": a row holds the tokens that its samples have in common at their beginnings (such as
    the prompt of a group) once, where that pays; but not where Transformer Engine's attention runs
    over context-parallel ranks, which cannot. "off": each sample has its own tokens."""

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
        if self.calibrate == "online" and self.balance == "tokens":
            raise ConfigError(
                "plan.calibrate=online fits a cost model, which plan.balance=tokens does not read; "
                "set balance=time, or calibrate=off"
            )
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Adam and its learning-rate schedule, counted in optimizer steps."""

    lr: float = 1e-5
    """The highest learning rate."""
    min_lr: float = 0.0
    """The learning rate at the end of the decay."""
    warmup_steps: int = 0
    """Optimizer steps in which the learning rate rises linearly from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes from `lr` to `min_lr` after the warm-up."""
    weight_decay: float = 0.01
    """Decoupled weight decay; not applied to biases and norms."""
    adam_beta1: float = 0.9
    """Decay of the first moment, in [0, 1)."""
    adam_beta2: float = 0.95
    """Decay of the second moment, in [0, 1)."""
    adam_eps: float = 1e-8
    """Added to the square root of the second moment."""
    clip_grad: float = 1.0
    """Gradients are scaled down to this global norm; 0 = no clipping."""
    distributed_optimizer: bool = False
    """Split the optimizer's state over the data-parallel ranks."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients in buckets while the last backward of a step runs. null = on CUDA with more
    than one data-parallel rank, unless train.on_oom=replan."""
    overlap_param_gather: bool | None = None
    """Gather the updated weights in buckets while the next forward runs. Needs
    distributed_optimizer and overlap_grad_reduce; null = with both."""
    bucket_size: int | None = None
    """Parameters of a bucket; null = 40 million, or a million per data-parallel rank if that is
    more."""

    def __post_init__(self) -> None:
        at_least(self, "optim", 0, "lr", "min_lr", "warmup_steps", "weight_decay", "clip_grad")
        at_least(self, "optim", 0, "adam_beta1", "adam_beta2", "adam_eps")
        at_least(self, "optim", 1, "bucket_size")
        if self.overlap_param_gather and (
            not self.distributed_optimizer or self.overlap_grad_reduce is False
        ):
            raise ConfigError(
                "optim.overlap_param_gather=true needs optim.distributed_optimizer=true, and "
                "optim.overlap_grad_reduce=true or null; set these, or overlap_param_gather=null"
            )
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
class LoopConfig:
    """How long the job runs, what it logs and saves, and how it resumes."""

    num_batches: int | None = None
    """Stop after this many batches of prompts; null = after the epochs."""
    epochs: int = 1
    """Passes over the data."""
    log_interval: int = 1
    """Log a line every this many optimizer steps; `metrics.jsonl` gets every step."""
    entropy_interval: int = 10
    """Report the entropy every this many optimizer steps, from the first on; 0 = never. The metric
    costs a pass over all logits, and it moves over tens of steps. With `objective.entropy_coef` it
    is computed, and reported, in every step."""
    trace_steps: int = 0
    """Number of optimizer steps, from the second on, whose forwards and backwards are timed on
    every rank and written to `trace.jsonl`, for `megapack trace` and `megapack report`; 0 = no
    trace."""
    save_interval: int | None = None
    """Save a checkpoint every this many optimizer steps, after the last step, and when SIGTERM or
    SIGUSR1 ends the run; null = no checkpoints. All ranks must see the run's folder."""
    keep_checkpoints: int | None = 2
    """Number of complete checkpoints to keep, the latest ones; null = all."""
    async_save: bool = False
    """Write checkpoints while training goes on: it waits only for a copy of the tensors into host
    memory. Each rank needs that much memory more."""
    save_threads: int = 4
    """Threads per rank that write a checkpoint, each into a file of its own."""
    resume: str | None = None
    """Resume from a checkpoint: its folder, the folder of a run (its latest checkpoint), or auto
    (the latest checkpoint of this run, or the start if it has none); null = from the start."""
    export_hf: Literal["last", "checkpoints"] | None = None
    """Write the weights as a Hugging Face folder `hf/step-N` in the run's folder: last = after the
    last step; checkpoints = also with every checkpoint of `save_interval`. Needs model.hf_path;
    null = never, `megapack export` does it later from a checkpoint."""
    on_oom: Literal["error", "replan"] = "error"
    """If a GPU runs out of memory: error ends the run, replan repeats the step once in rows of half
    the size. replan needs ranks that do not communicate inside layers (tp = cp = ep = 1 and
    plan.context_parallel=fixed); the metric `num_oom_replans` counts the repeated steps."""
    routing_replay: RoutingReplay = "none"
    """The experts that tokens go through in all steps of a batch: none: those that the routers
    choose; rollout: those in the rollouts' `routed_experts`, also in the pass for old log-probs;
    old_logprobs: those of that pass."""
    executor: ExecutorChoice = "auto"
    """What runs a step: megatron: Megatron's schedules; operations: the plan's list of forwards,
    backwards and weight gradients, or the one that Megatron's schedules would run; auto: operations
    where the plan needs them, under plan.split_samples=auto or plan.backward=split."""
    manual_gc_interval: int | None = 100
    """Collect Python's cyclic garbage every this many optimizer steps, on all ranks at the same
    step; ranks that collect at different times wait for each other. null = Python decides."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go in addition to `metrics.jsonl`; the packages of these names must be
    installed."""

    def __post_init__(self) -> None:
        at_least(self, "train", 1, "num_batches", "epochs", "log_interval", "save_interval")
        at_least(self, "train", 1, "keep_checkpoints", "manual_gc_interval", "save_threads")
        at_least(self, "train", 0, "trace_steps", "entropy_interval")
        if self.resume == "":
            raise ConfigError("train.resume is empty; set a folder, auto, or null")
        if len(set(self.trackers)) < len(self.trackers):
            raise ConfigError(f"train.trackers is {list(self.trackers)}; name each once")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """When a step counts as late, and when the job is aborted."""

    slow_factor: float = 5.0
    """A step is late after this many times its predicted seconds, but not before `slow_after_s`;
    every rank then logs its phase, micro-batch and last exchange."""
    slow_after_s: float = 60.0
    """Seconds before which no step is late; the only limit for a step without a prediction."""
    abort_after_s: float | None = None
    """Seconds after which a step, a pass for log-probs or a checkpoint is aborted and the job ends
    with an error on every rank; null = never, except for the timeouts of the process groups."""

    def __post_init__(self) -> None:
        for name in ("slow_factor", "slow_after_s", "abort_after_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"watchdog.{name}={value} must be above 0 and finite; set 60")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of a run. The run's folder gets them as they were resolved."""

    name: str
    """The run's name, and the name of its folder under `runs_dir`."""
    device: Device = "cuda"
    """cpu redirects Megatron-Core's CUDA calls to the CPU; it is never chosen automatically."""
    seed: int = 1234
    """Seed of the weights, dropout, and the order of shuffled data."""
    runs_dir: str = "runs"
    """The folder of run folders; relative to the working directory."""
    layout: LayoutConfig = dataclasses.field(default_factory=LayoutConfig)
    """Parallel groups."""
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
    """Packing. Set a budget or a micro-batch size: it depends on the GPU's memory."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    """The GPT."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """Rollouts."""
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    """The loss."""
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    """A value model."""
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    """The optimizer."""
    train: LoopConfig = dataclasses.field(default_factory=LoopConfig)
    """The loop."""
    watchdog: WatchdogConfig = dataclasses.field(default_factory=WatchdogConfig)
    """Late steps."""

    def __post_init__(self) -> None:
        at_least(self, "", 0, "seed")
        if self.name in ("", ".", "..") or any(c in self.name for c in "/\\\0\n"):
            raise ConfigError(f"name is {self.name!r}; set a folder's name, without / in it")
        check_run(self)

    @property
    def executor(self) -> Executor:
        """What runs the steps."""
        return choose_executor(self.plan, self.train.executor)

    @property
    def row_plan(self) -> PlanConfig:
        """`plan`, with share_prefixes="off" where the attention cannot share: Transformer Engine
        has no kernel for it over several ranks. Its kernel is preferred in bf16 on GPUs."""
        model = self.model
        is_wide = self.plan.context_parallel == "dynamic" and self.layout.dp != 1
        preferred = self.device == "cuda" and model.dtype == "bf16" and model.attention == "auto"
        on_te = preferred or model.attention == "te" or model.fp8 is not None
        if on_te and (self.layout.cp > 1 or is_wide):
            return dataclasses.replace(self.plan, share_prefixes="off")
        return self.plan

    @property
    def tokenizer_folder(self) -> str | None:
        """The folder of the Hugging Face tokenizer; None = text is bytes.

        Raises:
            ConfigError: data.tokenizer=hf, and no key names a folder.
        """
        data = self.data
        if data.path is None or data.tokenizer == "bytes":
            return None
        folder = data.tokenizer_path or self.model.hf_path
        if folder is None and data.tokenizer == "hf":
            raise ConfigError(
                "data.tokenizer=hf needs a folder; set data.tokenizer_path or model.hf_path"
            )
        return folder

    @property
    def longest_sample(self) -> int:
        """Tokens that a sample may have, prompt and response."""
        return self.data.max_length or self.model.max_position_embeddings

    @property
    def stage_layers(self) -> StageLayers:
        """The number of transformer layers of each pipeline chunk."""
        return self._split(self.layout)

    def _split(self, layout: ParallelSizes) -> StageLayers:
        """`stage_layers` on a layout that may have another pp and vpp than this config's."""
        return self.layout.stage_layers(
            self.model.num_layers,
            pp=layout.pp,
            vpp=layout.vpp,
            num_mtp_layers=self.model.mtp_num_layers,
        )

    @property
    def typical_sample(self) -> int:
        """Tokens of the sample that a typical token is in, for the share of attention."""
        return max(1, self.longest_sample // _LONGEST_OVER_TYPICAL)

    @property
    def assumed_speed(self) -> GpuSpeed:
        """The speed of a GPU that is assumed without a measured cost model."""
        return GpuSpeed.of(self.device, self.model.dtype)

    @property
    def cost_basis(self) -> str:
        """Where the cost model comes from, in one line."""
        if self.plan.cost_model is not None:
            return f"of the cost model {self.plan.cost_model}"
        return f"from the model's sizes; {self.assumed_speed.basis}"

    def cost_model(self, layout: Layout) -> CostModel:
        """The cost model of a run: `plan.cost_model`, or of the model's sizes on an assumed GPU.

        Where layers are split unevenly and the file has no `stage_weights`, these follow from the
        sizes.

        Raises:
            ConfigError: see `cost_file.read_cost`.
        """
        measured = self.plan.read_cost(layout)
        if measured is None:
            return self.cost_from_sizes(layout)
        split = self._split(layout)
        if split.is_even or measured.stage_weights is not None:
            return measured
        weights = self.cost_from_sizes(layout).stage_weights
        return dataclasses.replace(measured, stage_weights=weights)

    def cost_from_sizes(
        self, layout: Layout, speed: GpuSpeed | None = None, *, value_head: bool = False
    ) -> CostModel:
        """The cost model of the model's sizes.

        Args:
            speed: of a GPU; None for `assumed_speed`.
            value_head: a value head, of one row, replaces the vocabulary's projection.
        """
        sizes = self.model.to_sizes()
        value_head = value_head or self.objective.has_value_head
        return cost_from_sizes(
            dataclasses.replace(sizes, vocab_size=1) if value_head else sizes,
            layout,
            speed or self.assumed_speed,
            recompute=self.model.recompute,
            recompute_modules=self.model.recompute_modules,
            mean_length=self.typical_sample,
            stage_layers=self._split(layout),
        )

    def memory_model(self) -> MemoryModel:
        """The memory model of this config, with the kernels that its device is meant to have."""
        model = self.model
        on_gpu = self.device == "cuda"
        preferred: Kernel = "te" if on_gpu and model.dtype == "bf16" else "sdpa"
        fused_swiglu = model.bias_activation_fusion
        return MemoryModel(
            sizes=self.model.to_sizes(),
            # None fits other layouts of the model too.
            stage_layers=None if self.stage_layers.is_even else self.stage_layers,
            untied_embeddings=self.model.untie_embeddings,
            dtype=self.model.dtype,
            distributed_optimizer=self.optim.distributed_optimizer,
            recompute=self.model.recompute,
            recompute_modules=self.model.recompute_modules,
            logprob_chunk_tokens=self.objective.logprob_chunk_tokens,
            attention=preferred if model.attention == "auto" else model.attention,
            fused_swiglu=on_gpu if fused_swiglu is None else fused_swiglu,
            composite_norms=not on_gpu and model.normalization == "RMSNorm",
            critic=self.critic.enabled,
            value_head=self.objective.has_value_head,
            executor=self.executor,
        )


def check_installed(names: Sequence[str]) -> None:
    """Raise ConfigError for the first tracker whose package, of the same name, is missing."""
    for name in names:
        spec = importlib.util.find_spec(name)
        # W&B leaves a folder `wandb` behind, which Python finds as a package without an origin.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"train.trackers has {name}, which is not installed; pip install {name}, or leave "
                "it out"
            )
