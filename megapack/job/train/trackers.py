"""Optional trackers of metrics, in addition to metrics.jsonl: TensorBoard, Weights & Biases, MLflow
and SwanLab.

The keys are those of metrics.jsonl. Text and null are left out, because they have no curve.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
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
    made: dict[str, Any] = {
        "tensorboard": _TensorBoard,
        "wandb": _WeightsAndBiases,
        "mlflow": _MLflow,
        "swanlab": _SwanLab,
    }
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
        self._run = _started(wandb.init, config, id_file, continue_after, dir=str(folder))
        self._run.define_metric("*", step_metric="step")

    def write(self, metrics: Metrics) -> None:
        self._run.log(_numbers(metrics))

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """One MLflow run for the whole run, resumes included; its id is stored in `mlflow_id`.

    MLflow's own variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...) apply. Without a
    tracking URI the run is in `mlflow.db`, an SQLite file in the folder.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], continue_after: int | None) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            self._mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        id_file = folder / "mlflow_id"
        known = _known_id(id_file, continue_after)
        run = self._mlflow.start_run(run_id=known, run_name=config["name"])
        if known is None:
            # MLflow refuses other values later, and a resume has another train.resume.
            self._mlflow.log_params(dict(_flat(config)))
        write_whole(id_file, run.info.run_id)

    def write(self, metrics: Metrics) -> None:
        values = _numbers(metrics)
        self._mlflow.log_metrics(values, step=values.pop("step"))

    def close(self) -> None:
        self._mlflow.end_run()


class _SwanLab(_WeightsAndBiases):
    """One SwanLab run for the whole run, resumes included; its id is stored in `swanlab_id`.

    SwanLab's own variables (SWANLAB_MODE, SWANLAB_PROJECT_NAME, ...) apply. In its modes without a
    server each start has a folder of its own in `swanlog/`, all with the same id.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], continue_after: int | None) -> None:
        import swanlab

        id_file, logs = folder / "swanlab_id", str(folder / "swanlog")
        self._run = _started(swanlab.init, config, id_file, continue_after, log_dir=logs)

    def write(self, metrics: Metrics) -> None:
        values = _numbers(metrics)
        self._run.log(values, step=values.pop("step"))


def _started(
    start: Any, config: Mapping[str, Any], id_file: Path, continue_after: int | None, **logs: str
) -> Any:
    """A run of the service, the same one after a resume."""
    known = _known_id(id_file, continue_after)
    run = start(name=config["name"], id=known, resume="allow", config=dict(config), **logs)
    write_whole(id_file, run.id)
    return run


def _known_id(file: Path, continue_after: int | None) -> str | None:
    """The id that an earlier start of this run stored, or None."""
    return file.read_text() if continue_after is not None and file.exists() else None


def _flat(config: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested sections, by dotted keys."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{section}{key}.")
        else:
            yield f"{section}{key}", value


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}
