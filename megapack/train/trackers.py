"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, when asked for.

The keys are those of metrics.jsonl. Text and null have no curve and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megapack.base.files import write_whole

Metrics = Mapping[str, float | int | str | None]


class Tracker(Protocol):
    """Takes the metrics of one run; used on one rank."""

    def write(self, metrics: Metrics) -> None:
        """Take the metrics of the step that `metrics["step"]` says."""

    def close(self) -> None:
        """Write out what is held back."""


def open_trackers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], *, continue_after: int | None
) -> list[Tracker]:
    """The trackers of a run, by the names of `train.trackers`.

    Args:
        folder: of the run.
        config: nested plain values; `name` is the run's.
        continue_after: steps that the run keeps of those that are in the folder; None = a new run.
    """
    made: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases}
    return [made[name](folder, config, continue_after) for name in names]


class _TensorBoard:
    """Event files in `tensorboard/`; what a resumed run takes again is hidden there."""

    def __init__(self, folder: Path, config: Mapping[str, Any], continue_after: int | None) -> None:
        from torch.utils import tensorboard

        writer: Any = tensorboard.SummaryWriter
        first_step = None if continue_after is None else continue_after + 1
        self._writer = writer(str(folder / "tensorboard"), purge_step=first_step)

    def write(self, metrics: Metrics) -> None:
        for key, value in _numbers(metrics).items():
            if key != "step":
                self._writer.add_scalar(key, value, metrics["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One W&B run for the whole run, resumes included; its id is kept in `wandb_id`.

    W&B's own variables (WANDB_MODE, WANDB_PROJECT, ...) hold. Its history cannot be cut: steps that
    a resumed run takes again are logged twice, and curves are drawn over `step`.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], continue_after: int | None) -> None:
        import wandb

        known = folder / "wandb_id"
        self._run: Any = wandb.init(
            name=config["name"],
            id=known.read_text() if continue_after is not None and known.exists() else None,
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )
        self._run.define_metric("*", step_metric="step")
        write_whole(known, self._run.id)

    def write(self, metrics: Metrics) -> None:
        self._run.log(_numbers(metrics))

    def close(self) -> None:
        self._run.finish()


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}
