"""Trackers get the keys and steps of metrics.jsonl. W&B is a stand-in, the others are real."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megapack.errors import ConfigError
from megapack.job.config.sections import check_installed
from megapack.job.train.folder import RunFolder
from megapack.job.train.trackers import open_trackers

pytestmark = pytest.mark.unit

CONFIG = {"name": "run", "train": {"epochs": 1}}


def metrics(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 0.5 / step, "plan_digest": "ab", "step_predicted_s": None}


def write(runs_dir: Path, name: str, steps: range, *, continue_after: int | None) -> None:
    """One start of a run with one tracker."""
    folder = RunFolder(str(runs_dir), "run", continue_after=continue_after)
    folder.trackers = open_trackers([name], folder.path, CONFIG, continue_after=continue_after)
    for step in steps:
        folder.append_metrics(metrics(step))
    folder.close()


def test_a_tracker_that_is_not_installed_is_refused() -> None:
    check_installed(["json"])
    with pytest.raises(ConfigError, match="pip install no_such_tracker"):
        check_installed(["json", "no_such_tracker"])


def test_a_folder_with_a_trackers_name_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B leaves a folder `wandb` in the working directory."""
    (tmp_path / "left_by_a_run").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="pip install left_by_a_run"):
        check_installed(["left_by_a_run"])


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, "tensorboard", range(1, 6), continue_after=None)
    write(tmp_path, "tensorboard", range(4, 8), continue_after=3)
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    assert found.Tags()["scalars"] == ["loss"]
    points = [(event.step, event.value) for event in found.Scalars("loss")]
    assert points == [(step, pytest.approx(0.5 / step)) for step in range(1, 8)]


@pytest.mark.filterwarnings("default")  # SQLAlchemy's, about what MLflow calls
def test_a_resumed_run_continues_the_same_mlflow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for needed in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(needed)
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    before = mlflow.get_tracking_uri()
    try:
        write(tmp_path, "mlflow", range(1, 6), continue_after=None)
        write(tmp_path, "mlflow", range(4, 8), continue_after=3)
        client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
        (run,) = client.search_runs(["0"])
        assert run.info.run_id == (tmp_path / "run" / "mlflow_id").read_text()
        assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
        assert run.data.params == {"name": "run", "train.epochs": "1"}
        assert set(run.data.metrics) == {"loss"}
        points = {p.step: p.value for p in client.get_metric_history(run.info.run_id, "loss")}
        assert points == {step: pytest.approx(0.5 / step) for step in range(1, 8)}
    finally:
        mlflow.set_tracking_uri(before)


@pytest.mark.filterwarnings("default")
def test_a_resumed_run_continues_the_same_swanlab_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    # Its own settings and key, if the user has some.
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "swanlab", range(1, 6), continue_after=None)
    first_id = (tmp_path / "run" / "swanlab_id").read_text()
    write(tmp_path, "swanlab", range(4, 8), continue_after=3)
    assert (tmp_path / "run" / "swanlab_id").read_text() == first_id
    files = sorted((tmp_path / "run" / "swanlog").glob(f"*/run-{first_id}.swanlab"))
    assert [swanlab_scalars(file) for file in files] == [
        [("loss", step, pytest.approx(0.5 / step)) for step in steps]
        for steps in (range(1, 6), range(4, 8))
    ]


def swanlab_scalars(file: Path) -> list[tuple[str, int, float]]:
    """(key, step, value) of a file that `swanlab sync` would send, read as it reads them."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader = DataStoreReader()
    reader.open(file)
    found = []
    while (data := reader.scan()) is not None:
        record = Record.FromString(data)
        if record.HasField("scalar"):
            scalar = record.scalar
            found.append((scalar.key, scalar.step, scalar.value.number))
    reader.close()
    return found


class Wandb:
    """Stands in for the module `wandb` and records the calls."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished = 0
        self.id = ""

    def init(self, **options: Any) -> Wandb:
        self.inits.append(options)
        self.id = options["id"] or f"made{len(self.inits)}"
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


def test_a_resumed_run_continues_the_same_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write(tmp_path, "wandb", range(1, 6), continue_after=None)
    write(tmp_path, "wandb", range(4, 8), continue_after=3)
    assert [options["id"] for options in wandb.inits] == [None, "made1"]
    assert {options["resume"] for options in wandb.inits} == {"allow"}
    assert wandb.inits[0]["config"] == CONFIG
    assert [line["step"] for line in wandb.logged] == [1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert wandb.logged[0] == {"step": 1, "loss": 0.5}
    assert wandb.finished == 2
    # A new run with the same name is another W&B run.
    write(tmp_path, "wandb", range(1, 2), continue_after=None)
    assert wandb.inits[-1]["id"] is None
