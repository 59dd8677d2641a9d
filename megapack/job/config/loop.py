"""The config's sections `optim` and `train`."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megapack.base.choices import ExecutorChoice, RoutingReplay
from megapack.config.bounds import at_least, without_effect
from megapack.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule, counted in optimizer steps."""

    name: Literal["adam", "muon"] = "adam"
    """Megatron-Core's optimizer. muon: Muon for the matrices of layers, and Adam for embeddings,
    the head, norms and biases; it needs Megatron-Core 0.18 and the package emerging-optimizers, and
    distributed_optimizer=false. See docs/muon.md."""
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
    muon_momentum: float = 0.95
    """Decay of Muon's momentum, in [0, 1)."""
    muon_nesterov: bool = False
    """Nesterov's momentum."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations that make a matrix about orthogonal."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """What the orthogonal matrix is multiplied with, for one of shape [out, in]:
    sqrt(max(out, in)), sqrt(out / in), or sqrt(max(1, out / in))."""
    muon_extra_scale_factor: float = 1.0
    """A further factor. With 0.2 and spectral, updates are about as large as Adam's, so that its
    learning rate and weight decay can stay."""
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = "blockwise"
    """With layout.tp > 1. blockwise: each rank makes its part of a matrix orthogonal by itself, so
    results depend on tp. duplicated and distributed: the whole matrix, gathered on each rank, or by
    sums over the ranks."""
    muon_fp32_matmul_prec: Literal["highest", "high", "medium"] = "medium"
    """Precision of the iterations' products, as in torch.set_float32_matmul_precision."""
    clip_grad: float = 1.0
    """Gradients are scaled down to this global norm; 0 = no clipping."""
    distributed_optimizer: bool = False
    """Split the optimizer's state over the data-parallel ranks."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients in buckets while the last backward of a step runs. null = on CUDA with more
    than one data-parallel rank."""
    overlap_param_gather: bool | None = None
    """Gather the updated weights in buckets while the next forward runs. Needs
    distributed_optimizer and overlap_grad_reduce; null = with both."""
    bucket_size: int | None = None
    """Parameters of a bucket; null = 40 million, or a million per data-parallel rank if that is
    more."""

    def __post_init__(self) -> None:
        at_least(self, "optim", 0, "lr", "min_lr", "warmup_steps", "weight_decay", "clip_grad")
        at_least(self, "optim", 0, "adam_beta1", "adam_beta2", "adam_eps")
        at_least(self, "optim", 0, "muon_momentum", "muon_extra_scale_factor")
        at_least(self, "optim", 1, "bucket_size", "muon_num_ns_steps")
        self._check_muon()
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

    def _check_muon(self) -> None:
        if self.muon_momentum >= 1:
            raise ConfigError(f"optim.muon_momentum={self.muon_momentum} must be below 1; set 0.95")
        if self.name == "muon" and self.distributed_optimizer:
            raise ConfigError(
                "optim.name=muon needs whole matrices on each rank, and "
                "optim.distributed_optimizer=true splits them; set it to false, or optim.name=adam"
            )
        if self.name != "muon":
            needed = f"with optim.name={self.name}; set optim.name=muon"
            names = [field.name for field in dataclasses.fields(self)]
            own = (name for name in names if name.startswith("muon_"))
            without_effect(self, "optim", needed, *own)


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
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab"], ...] = ()
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
