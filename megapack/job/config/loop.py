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
    """muon: Muon for layers' matrices, Adam for the rest. Needs Megatron-Core `0.18`,
    emerging-optimizers, and distributed_optimizer=false."""
    lr: float = 1e-5
    """The highest learning rate."""
    min_lr: float = 0.0
    """The learning rate at the end of the decay."""
    warmup_steps: int = 0
    """Optimizer steps in which the learning rate rises from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """From `lr` to `min_lr`, after the warm-up."""
    weight_decay: float = 0.01
    """Decoupled; not of biases and norms."""
    adam_beta1: float = 0.9
    """Decay of the first moment, in [0, 1)."""
    adam_beta2: float = 0.95
    """Decay of the second moment, in [0, 1)."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    muon_momentum: float = 0.95
    """Muon's momentum, in [0, 1)."""
    muon_nesterov: bool = False
    """Nesterov's momentum."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor for a matrix [out, in]: sqrt(max(out, in)), sqrt(out / in), sqrt(max(1, out / in))."""
    muon_extra_scale_factor: float = 1.0
    """A further factor. With `0.2` and spectral, updates are about Adam's."""
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = "blockwise"
    """tp > 1. blockwise: each rank's part by itself, so that results depend on tp. Others: the
    whole matrix."""
    muon_fp32_matmul_prec: Literal["highest", "high", "medium"] = "medium"
    """Precision of the iterations' products."""
    clip_grad: float = 1.0
    """Highest norm of the gradient; 0 = no clipping."""
    distributed_optimizer: bool = False
    """Split the optimizer's state over data-parallel ranks."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients during a step's last backward; null = on CUDA with dp > 1."""
    overlap_param_gather: bool | None = None
    """Gather updated weights during the next forward; null = with the two keys that it needs:
    distributed_optimizer and overlap_grad_reduce."""
    bucket_size: int | None = None
    """Parameters of a bucket; null = 40 million, or a million per data-parallel rank if more."""

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
    """Batches after which the run stops; null = after the epochs."""
    epochs: int = 1
    """Passes over the data."""
    log_interval: int = 1
    """Optimizer steps between lines of the log; `metrics.jsonl` gets every step."""
    entropy_interval: int = 10
    """Optimizer steps between entropies in the metrics, each a pass over all logits; 0 = never."""
    trace_steps: int = 0
    """Optimizer steps, from the second on, whose operations are timed for `megapack report`."""
    save_interval: int | None = None
    """Optimizer steps between checkpoints; null = none. Also saved: the last step, and on SIGTERM
    or SIGUSR1. All ranks must see the run's folder."""
    keep_checkpoints: int | None = 2
    """Latest checkpoints to keep; null = all."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in host memory."""
    save_threads: int = 4
    """Threads per rank that write a checkpoint."""
    resume: str | None = None
    """A checkpoint, a run's folder, or auto: this run's latest checkpoint, if any."""
    export_hf: Literal["last", "checkpoints"] | None = None
    """Write weights to `hf/step-N` of the run's folder: after the last step, or also with every
    checkpoint. Needs model.hf_path."""
    routing_replay: RoutingReplay = "none"
    """Experts in a batch's steps: the routers' (none), those of the column `routed_experts`, or
    those of the pass for old log-probs."""
    executor: ExecutorChoice = "auto"
    """Megatron's schedules, or the plan's list of operations. auto: operations where the plan needs
    them."""
    manual_gc_interval: int | None = 100
    """Optimizer steps between Python's garbage collections, on all ranks together; null = Python
    decides."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab"], ...] = ()
    """Where metrics go beside `metrics.jsonl`; their packages must be installed."""

    def __post_init__(self) -> None:
        at_least(self, "train", 1, "num_batches", "epochs", "log_interval", "save_interval")
        at_least(self, "train", 1, "keep_checkpoints", "manual_gc_interval", "save_threads")
        at_least(self, "train", 0, "trace_steps", "entropy_interval")
        if self.resume == "":
            raise ConfigError("train.resume is empty; set a folder, auto, or null")
        if len(set(self.trackers)) < len(self.trackers):
            raise ConfigError(f"train.trackers is {list(self.trackers)}; name each once")
