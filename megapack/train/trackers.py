"""Optional trackers of metrics, in addition to metrics.jsonl: TensorBoard and Weights & Biases.

The keys are those of metrics.jsonl. Text and null are left out, because they have no curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megapack.base.files import write_whole

Metrics = Mapping[str, float | int | str | None]


class Tracker(Protocol):
    """Receives the metrics of one run; only rank 0 has trackers."""

    def write(self, metrics: Metrics) -> None:
        """Write the metrics of step `metrics["step"]`."""

    def close(self) -> None:
        """Write what is still buffered and end the tracker."""


def open_trackers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], *, continue_after: int | None
) -> list[Tracker]:
    """Open the trackers of a run.

    Args:
        names: as in `train.trackers`.
        folder: the run's folder.
        config: the run's config as nested plain values.
        continue_after: see `RunFolder`.
    """
    made: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases}
    return [made[name](folder, config, continue_after) for name in names]


class _TensorBoard:
    """Event files in `tensorboard/`; TensorBoard hides the old points of repeated steps."""

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
    """One W&B run for the whole run, resumes included; its id is stored in `wandb_id`.

    W&B's own variables (WANDB_MODE, WANDB_PROJECT, ...) apply. W&B's history cannot be cut: steps
    that a resumed run repeats are logged twice, and curves are drawn over `step`.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], continue_after: int | None) -> None:
        import wandb

        id_file = folder / "wandb_id"
        self._run: Any = wandb.init(
            name=config["name"],
            id=id_file.read_text() if continue_after is not None and id_file.exists() else None,
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )
        self._run.define_metric("*", step_metric="step")
        write_whole(id_file, self._run.id)

    def write(self, metrics: Metrics) -> None:
        self._run.log(_numbers(metrics))

    def close(self) -> None:
        self._run.finish()


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}
