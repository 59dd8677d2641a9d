"""The sections `train` and `watchdog` of the main job's configuration; see `train_config`."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Literal

from megapack.errors import ConfigError
from megapack.model_config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long the job runs and what it tells."""

    num_batches: int | None = None
    """Stop after this many batches of prompts; null = when the epochs are over."""
    epochs: int = 1
    """Passes over the data."""
    log_interval: int = 1
    """A line is logged every this many optimizer steps; `metrics.jsonl` gets every step."""
    trace_steps: int = 0
    """Optimizer steps, from the second on, whose forwards and backwards are timed on every rank and
    written to `trace.jsonl`, for `megapack trace` and `megapack report`; 0 = none."""
    save_interval: int | None = None
    """A checkpoint is saved every this many optimizer steps, after the last, and where SIGTERM or
    SIGUSR1 ends the run; null = none. All ranks must see the run's folder."""
    keep_checkpoints: int | None = 2
    """Complete checkpoints that stay, the latest; null = all."""
    resume: str | None = None
    """Go on from a checkpoint: its folder, the folder of a run (its latest), or auto (the latest
    of this run, and from the start where there is none); null = from the start."""
    on_oom: Literal["error", "replan"] = "error"
    """A GPU out of memory ends the run, or the step is taken once more in rows of half the size;
    that needs ranks that do not meet inside layers (tp = cp = ep = 1). `num_oom_replans` counts."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides `metrics.jsonl`; the packages of these names must be installed."""

    def __post_init__(self) -> None:
        at_least(self, "train", 1, "num_batches", "epochs", "log_interval", "save_interval")
        at_least(self, "train", 1, "keep_checkpoints")
        at_least(self, "train", 0, "trace_steps")
        if self.resume == "":
            raise ConfigError("train.resume is empty; set a folder, auto, or null")
        if len(set(self.trackers)) < len(self.trackers):
            raise ConfigError(f"train.trackers is {list(self.trackers)}; name each once")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """When a step is late, and what happens then."""

    slow_factor: float = 5.0
    """A step is late after this many times its predicted seconds, and after `slow_after_s`; every
    rank then logs its phase, micro-batch and last exchange."""
    slow_after_s: float = 60.0
    """Seconds before which no step is late; all that counts while nothing is predicted."""
    abort_after_s: float | None = None
    """Seconds after which a step, a pass for log-probs or a checkpoint is given up and the job ends
    with an error on every rank; null = never, the process groups' own timeouts aside."""

    def __post_init__(self) -> None:
        for name in ("slow_factor", "slow_after_s", "abort_after_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"watchdog.{name}={value} must be above 0 and finite; set 60")


def check_installed(names: Sequence[str]) -> None:
    """Raise ConfigError for the first tracker whose package, of the same name, is missing."""
    for name in names:
        spec = importlib.util.find_spec(name)
        # A folder of that name, which W&B leaves behind, is found as a package without an origin.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"train.trackers has {name}, which is not installed; pip install {name}, or leave "
                "it out"
            )
