"""What a run leaves behind, and what people see meanwhile."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megapack import cli
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import CheckpointError, ConfigError, DataError
from megapack.layout import Layout
from megapack.outlook.stats import step_report
from megapack.train import folder as report
from megapack.train.folder import Progress, RunFolder, StepClock, packing_metrics, plan_line
from tests.metric_names import documented

pytestmark = pytest.mark.unit


def folder(path: Path, name: str = "run") -> RunFolder:
    """A run folder whose file is closed again."""
    made = RunFolder(str(path), name)
    made.close()
    return made


def test_a_folder_holds_metrics_as_lines_of_json(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path / "runs"), "run")
    run.append_metrics({"step": 1, "loss": 0.5, "step_predicted_s": None})
    # A run that is killed keeps the lines so far.
    before_close = (run.path / "metrics.jsonl").read_text()
    run.append_metrics({"step": 2, "loss": 0.25, "plan_digest": "ab"})
    run.close()
    assert [json.loads(line) for line in before_close.splitlines()] == [
        {"step": 1, "loss": 0.5, "step_predicted_s": None}
    ]
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_no_number_leaves_the_line_json(tmp_path: Path, value: float) -> None:
    run = RunFolder(str(tmp_path), "run")
    run.append_metrics({"step": 1, "loss": value})
    run.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = (run.path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse)["step"] == 1


def test_earlier_runs_are_kept_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        folder(tmp_path).write_text("config.yaml", f"run {number}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]
    texts = {p.name: (p / "config.yaml").read_text() for p in tmp_path.iterdir()}
    assert texts == {"run.1": "run 0", "run.2": "run 1", "run": "run 2"}
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
    assert "run.2" in caplog.records[1].getMessage()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path), "run")
    run.append_metrics({"step": 1})
    for continue_after in (None, 0):
        with pytest.raises(ConfigError, match=rf"run is in use by process {os.getpid()} on .*set "):
            RunFolder(str(tmp_path), "run", continue_after=continue_after)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    run.close()
    folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1"]


def test_a_process_holds_a_folder_until_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    code = (
        "import sys; from pathlib import Path; from megapack.train.folder import lock_folder\n"
        "file = lock_folder(Path('run')); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"in use by process {other.pid} on "):
            folder(tmp_path)
        other.kill()
    folder(tmp_path)
    assert (tmp_path / "run.1" / ".lock").exists()


def test_a_folder_that_cannot_be_locked_is_taken_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder(tmp_path)
    (told,) = caplog.records
    assert "no locks" in told.getMessage()


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder(tmp_path)
    run.write_text("plan.json", "first")
    run.write_text("plan.json", "second")
    assert (run.path / "plan.json").read_text() == "second"

    def fail(descriptor: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(CheckpointError, match=r"plan.json cannot be written \(no space left\)"):
        run.write_text("plan.json", "third")
    assert (run.path / "plan.json").read_text() == "second"


def test_no_part_of_a_file_is_left_after_writing(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.write_text("config.yaml", "name: ü\n")
    assert sorted(path.name for path in run.path.iterdir()) == [
        ".lock",
        "config.yaml",
        "metrics.jsonl",
    ]
    assert (run.path / "config.yaml").read_bytes() == "name: ü\n".encode()


def test_a_run_that_goes_on_cuts_later_lines_and_half_ones(tmp_path: Path) -> None:
    """Half a line of a trace may end like a whole one."""
    run = folder(tmp_path)
    lines = [json.dumps({"step": step, "events": {"a": step}}) + "\n" for step in (1, 2, 3)]
    for name in ("metrics.jsonl", "trace.jsonl"):
        (run.path / name).write_text("".join(lines)[:-2])
    RunFolder(str(tmp_path), "run", continue_after=2).close()
    for name in ("metrics.jsonl", "trace.jsonl"):
        assert (run.path / name).read_text() == "".join(lines[:2])
    (run.path / "metrics.jsonl").write_text(f"{lines[0]}\0\0\n{lines[1]}")
    with pytest.raises(DataError, match=r"metrics.jsonl:2 is no line of a step"):
        RunFolder(str(tmp_path), "run", continue_after=2)
    assert (run.path / "metrics.jsonl").read_text() == f"{lines[0]}\0\0\n{lines[1]}"


def metrics_of(lengths: list[int], layout: Layout, **kwargs: Any) -> dict[str, Any]:
    plan = build_dp_schedule(lengths, layout=layout, **kwargs)
    return packing_metrics(step_report(plan, plan.steps[0]))


def test_full_equal_rows_are_packed_perfectly() -> None:
    found = metrics_of([8, 8], Layout(dp=2), max_tokens_per_gpu=8)
    assert found["tokens"] == 16
    assert found["num_samples"] == 2
    assert found["num_microbatches_per_rank"] == 1
    assert found["num_padding_microbatches"] == found["num_dropped_rollouts"] == 0
    assert found["packing_efficiency"] == 1.0
    assert found["padding_fraction"] == 0.0
    assert found["imbalance"] == pytest.approx(1.0)
    assert found["bubble_fraction"] == pytest.approx(0.0, abs=1e-9)
    assert found["peak_live_row_tokens_per_gpu"] > 0


def test_padding_micro_batches_and_unequal_ranks_are_seen() -> None:
    # One sample for two ranks: the other one runs a padding micro-batch.
    found = metrics_of([64], Layout(dp=2), max_tokens_per_gpu=64)
    assert found["num_padding_microbatches"] == 1
    assert 0 < found["packing_efficiency"] < 1
    assert found["padding_fraction"] == pytest.approx(1 - found["packing_efficiency"])
    assert 1.5 < found["imbalance"] <= 2


def test_alignment_counts_as_padding() -> None:
    found = metrics_of([5, 3], Layout(cp=2), max_tokens_per_gpu=6)
    assert found["tokens"] == 8
    assert found["packing_efficiency"] == pytest.approx(8 / 12)


def test_the_clock_learns_the_seconds_of_a_simulated_unit() -> None:
    clock = StepClock()
    assert clock.predict(100.0) is None
    clock.record(100.0, 2.0)
    assert clock.predict(50.0) == pytest.approx(1.0)
    clock.record(300.0, 10.0)
    # 12 seconds for 400 units.
    assert clock.predict(100.0) == pytest.approx(3.0)


def test_simulated_seconds_are_the_prediction_as_they_are() -> None:
    clock = StepClock(in_seconds=True)
    assert clock.predict(2.5) == 2.5
    clock.record(2.5, 5.0)
    assert clock.predict(2.5) == 2.5


METRICS = {
    "loss": 0.5,
    "grad_norm": 1.25,
    "tokens_per_second": 1234.5,
    "packing_efficiency": 0.987,
    "num_microbatches_per_rank": 6,
    "step_measured_s": 0.5,
    "step_predicted_s": None,
    "kl_ref_nats": 0.1,
}


def test_without_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(active=True, log_interval=2)
    progress.line("starting")
    for number in range(1, 5):
        progress.step(number, METRICS)
    progress.close()
    out, err = capsys.readouterr()
    line = "loss 0.5000  grad 1.250  1234 tokens/s  packed 98.7%  M 6  0.50 s"
    assert out.splitlines() == ["starting", f"step 2: {line}", f"step 4: {line}"]
    assert "\r" not in out
    assert err == ""


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(active=False, log_interval=1)
    progress.line("starting")
    progress.step(1, METRICS)
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    progress = Progress(active=True, log_interval=10)
    progress.line("starting")
    progress.step(1, METRICS)
    progress.close()
    assert "starting\n" in screen.getvalue()
    assert "\r" in screen.getvalue()
    assert "loss 0.5000" in screen.getvalue()


def test_one_line_about_a_plan() -> None:
    plan = build_dp_schedule([4] * 20, layout=Layout(), micro_batch_size=1, global_batch_size=2)
    line = plan_line(plan)
    assert "\n" not in line
    assert line.startswith(f"plan {plan.digest()[:12]}: 20 samples, 10 step(s), M = 2, 2, ")
    assert line.endswith("2, ..., 0 rollout(s) dropped")


def test_memory_peaks_are_those_of_the_fullest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has 3 of 4 GiB; another one 5 allocated."""
    monkeypatch.setattr(report.cpu, "uses_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4 * 2**30)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda v, dtype, device: tensor(v, dtype=dtype))

    def with_other_rank(most: torch.Tensor, op: Any) -> None:
        most.copy_(torch.maximum(most, tensor([5.0, 1.0], dtype=torch.float64) * 2**30))

    monkeypatch.setattr(torch.distributed, "all_reduce", with_other_rank)
    found = report.memory_peaks()
    assert found == {"memory_peak_allocated_gib": 5.0, "memory_peak_reserved_gib": 4.0}
    assert set(found) == documented("CUDA")


def test_no_memory_peaks_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.cpu, "uses_cuda", lambda: False)
    report.reset_memory_peaks()
    assert report.memory_peaks() == {}


def test_a_resumed_run_loses_the_lines_after_its_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path), "run")
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
        run.append_line("trace.jsonl", {"step": step, "events": []})
    run.close()
    with open(run.path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')
    resumed = RunFolder(str(tmp_path), "run", continue_after=2)
    resumed.append_metrics({"step": 3})
    resumed.close()
    lines = (resumed.path / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 1}', '{"step": 2}', '{"step": 3}']
    traced = (resumed.path / "trace.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in traced] == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_batchs_plan_can_be_checked_against_its_lengths(tmp_path: Path) -> None:
    lengths = [5, 9, 3]
    plan = build_dp_schedule(lengths, layout=Layout(), max_tokens_per_gpu=16)
    run = folder(tmp_path)
    run.write_plan(plan, lengths)
    assert cli.main(["check", str(run.path / "plan.json"), str(run.path / "lengths.txt")]) == 0
