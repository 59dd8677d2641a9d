"""Metrics of a step, memory peaks, the step clock, and the progress bar."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch

from megapack.dp_schedule import build_dp_schedule
from megapack.job.train import metrics
from megapack.job.train.metrics import Progress, StepClock, plan_line
from megapack.layout import Layout
from megapack.outlook.stats import step_report
from megapack.plan.facts import step_metrics
from tests.metric_names import documented

pytestmark = pytest.mark.unit


def metrics_of(lengths: list[int], layout: Layout, **kwargs: Any) -> dict[str, Any]:
    plan = build_dp_schedule(lengths, layout=layout, **kwargs)
    return step_metrics(step_report(plan, plan.steps[0]))


def test_full_equal_rows_are_packed_perfectly() -> None:
    values = metrics_of([8, 8], Layout(dp=2), max_tokens_per_gpu=8)
    assert values["tokens"] == 16
    assert values["num_samples"] == 2
    assert values["num_microbatches_per_rank"] == 1
    assert values["num_padding_microbatches"] == values["num_dropped_rollouts"] == 0
    assert values["packing_efficiency"] == 1.0
    assert values["padding_fraction"] == 0.0
    assert values["imbalance"] == pytest.approx(1.0)
    assert values["bubble_fraction"] == pytest.approx(0.0, abs=1e-9)
    assert values["peak_live_row_tokens_per_gpu"] > 0


def test_padding_micro_batches_and_unequal_ranks_are_counted() -> None:
    # One sample for two ranks, so that one rank runs a padding micro-batch.
    values = metrics_of([6400], Layout(dp=2), max_tokens_per_gpu=6400)
    assert values["num_padding_microbatches"] == 1
    assert 0 < values["packing_efficiency"] < 1
    assert values["padding_fraction"] == pytest.approx(1 - values["packing_efficiency"])
    assert 1.5 < values["imbalance"] <= 2


def test_the_clock_learns_the_seconds_per_simulated_unit() -> None:
    clock = StepClock()
    assert clock.predict(100.0) is None
    clock.record(100.0, 2.0)
    assert clock.predict(50.0) == pytest.approx(1.0)
    clock.record(300.0, 10.0)
    # 12 seconds for 400 units.
    assert clock.predict(100.0) == pytest.approx(3.0)


def test_simulated_seconds_are_the_prediction() -> None:
    clock = StepClock(is_calibrated=True)
    assert clock.predict(2.5) == 2.5
    clock.record(2.5, 5.0)
    assert clock.predict(2.5) == 2.5


METRICS = {
    "loss": 0.5,
    "grad_norm": 1.25,
    "tokens_per_second": 1234.5,
    "padding_fraction": 0.013,
    "fill": 0.2,
    "entropy_nats": 5.5,
    "num_microbatches_per_rank": 6,
    "step_measured_s": 0.5,
    "step_predicted_s": None,
    "kl_ref_nats": 0.1,
}


def test_progress_is_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(active=True, log_interval=2)
    progress.line("starting")
    progress.expect(4)
    for number in range(1, 5):
        progress.step(number, METRICS)
    progress.close()
    out, err = capsys.readouterr()
    line = "loss 0.5000  grad 1.250  1234 tokens/s  padding 1.3%  fill 20.0%  M 6  0.50 s"
    assert out.splitlines() == ["starting", f"step 2/4: {line}", f"step 4/4: {line}"]
    assert "\r" not in out
    assert err == ""


@pytest.mark.parametrize(("total", "left"), [(12, ""), (24, "02:40 left"), (1000, "2:45:20 left")])
def test_step_lines_show_the_time_left(
    total: int, left: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps take 10 s, except for the first, which takes minutes; the run resumed after step 5."""
    clock = iter([500.0, 510.0, 520.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    progress = Progress(active=True, log_interval=1)
    progress.expect(total, 5)
    for number in (6, 7, 8):
        progress.step(number, {"loss": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"step 6/{total}: loss 0.5000"
    assert lines[2] == f"step 8/{total}: loss 0.5000{left and f'  {left}'}"


def test_fill_is_the_part_of_the_budget_that_rows_hold() -> None:
    values = metrics_of([20, 20], Layout(dp=2), max_tokens_per_gpu=100)
    assert (values["fill"], values["padding_fraction"]) == (0.2, 0.0)
    assert metrics_of([20, 20], Layout(dp=2), micro_batch_size=1)["fill"] is None


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


def test_a_plan_is_described_in_one_line() -> None:
    plan = build_dp_schedule([4] * 20, layout=Layout(), micro_batch_size=1, global_batch_size=2)
    line = plan_line(plan)
    assert "\n" not in line
    assert line.startswith(f"plan {plan.digest()[:12]}: 20 samples, 10 step(s), M = 2, 2, ")
    assert line.endswith("2, ..., 0 rollout(s) dropped")


def test_memory_peaks_are_those_of_the_fullest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank has 3 GiB allocated and 4 reserved; another rank has 5 and 1."""
    monkeypatch.setattr(metrics.cpu, "uses_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4 * 2**30)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda v, dtype, device: tensor(v, dtype=dtype))

    def with_other_rank(most: torch.Tensor, op: Any) -> None:
        most.copy_(torch.maximum(most, tensor([5.0, 1.0], dtype=torch.float64) * 2**30))

    monkeypatch.setattr(torch.distributed, "all_reduce", with_other_rank)
    peaks = metrics.memory_peaks()
    assert peaks == {"memory_peak_allocated_gib": 5.0, "memory_peak_reserved_gib": 4.0}
    assert set(peaks) == documented("CUDA")
