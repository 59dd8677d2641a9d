"""Metrics of a step, memory peaks, the step clock, and the progress bar.

    StepResult, StepReport -> metrics of the step -> metrics.jsonl, trackers, progress bar

`docs/metrics.md` explains every key.
"""

from __future__ import annotations

import sys
import time

import torch
from tqdm import tqdm

from megapack import cpu
from megapack.job.train.trackers import Metrics
from megapack.plan.facts import features_of
from megapack.plan.plan import Plan
from megapack.schedule.adapter import StepResult

# Metrics that the progress bar shows, and how. Entropy is not among them: few steps have it.
_SHOWN = {
    "loss": "loss {:.4f}",
    "grad_norm": "grad {:.3f}",
    "tokens_per_second": "{:.0f} tokens/s",
    "padding_fraction": "padding {:.1%}",
    "fill": "fill {:.1%}",
    "num_microbatches_per_rank": "M {}",
    "imbalance": "imbalance {:.2f}",
    "step_measured_s": "{:.2f} s",
}


def training_metrics(result: StepResult) -> dict[str, float]:
    """The loss and the objective's metrics; keys of metrics with a unit end with it."""
    with_units = {
        f"{k}_nats" if k.startswith("kl_") or k in ("entropy", "nll") else k: v
        for k, v in result.metrics.items()
    }
    return {"loss": result.loss, **with_units}


def reset_memory_peaks() -> None:
    """Start measuring a step's memory peaks; does nothing without CUDA."""
    if cpu.uses_cuda():
        torch.cuda.reset_peak_memory_stats()


def memory_peaks() -> dict[str, float]:
    """GiB since `reset_memory_peaks`, the maximum over all GPUs; empty without CUDA.

    A collective over all ranks: pipeline stages hold different amounts.
    """
    if not cpu.uses_cuda():
        return {}
    own = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    peaks = torch.tensor(own, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(peaks, op=torch.distributed.ReduceOp.MAX)
    allocated, reserved = (peaks / 2**30).tolist()
    return {"memory_peak_allocated_gib": allocated, "memory_peak_reserved_gib": reserved}


class StepClock:
    """Predicts the seconds of a step's forward and backward.

    With a measured cost model the simulated time is the prediction. One from the model's sizes
    assumes a GPU's speed, which may be far off: its seconds are multiplied by the measured over the
    simulated seconds of this run so far, and the first step has no prediction. After steps of 1 and
    3 simulated seconds that took 2 and 10 s, the factor is 3.

    Args:
        is_calibrated: the cost model was measured.
    """

    def __init__(self, *, is_calibrated: bool = False) -> None:
        self._is_calibrated = is_calibrated
        self._measured_s = 0.0
        self._simulated = 0.0

    def predict(self, makespan: float) -> float | None:
        """Seconds of a step with this simulated makespan; None before the first measured step."""
        if self._is_calibrated:
            return makespan
        if not self._simulated:
            return None
        return makespan * self._measured_s / self._simulated

    def record(self, makespan: float, measured_s: float) -> None:
        """Record a measured step, for later predictions."""
        self._measured_s += measured_s
        self._simulated += makespan


class Progress:
    """A progress bar on a terminal, plain lines elsewhere; silent on all ranks but one.

    Args:
        active: this rank shows the progress.
        log_interval: steps from one plain line to the next.
    """

    def __init__(self, *, active: bool, log_interval: int) -> None:
        self._active = active
        self._interval = log_interval
        on_terminal = active and sys.stdout.isatty()
        self._bar = tqdm(unit="step", file=sys.stdout) if on_terminal else None
        self._total = 0
        # The first step of this process, and when it ended: it may compile and allocate.
        self._first: tuple[int, float] | None = None

    def expect(self, num_steps: int, num_done: int = 0) -> None:
        """Set the number of steps of the whole run, and of those done before a resume."""
        self._total = num_steps
        if self._bar is not None:
            self._bar.reset(total=num_steps)
            self._bar.update(num_done)

    def step(self, number: int, metrics: Metrics) -> None:
        """Show one step's metrics, and without a bar the time left if it is a minute or more."""
        now = time.monotonic()
        first, began = self._first = self._first or (number, now)
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix_str(_short(metrics))
        elif self._active and number % self._interval == 0:
            left_s = (self._total - number) * (now - began) / max(1, number - first)
            left = f"  {tqdm.format_interval(left_s)} left" if left_s >= 60 else ""
            print(f"step {number}/{self._total}: {_short(metrics)}{left}", flush=True)

    def line(self, text: str) -> None:
        """Show a line of text, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self._active:
            print(text, flush=True)

    def close(self) -> None:
        """Stop updating the bar and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()


def plan_line(plan: Plan) -> str:
    """One line about a batch's plan."""
    steps = plan.steps
    counts = plan.counts
    features = "".join(f", {feature.line(counts)}" for feature in features_of(counts))
    spans = ", ".join(step.counts.microbatch_span for step in steps[:8])
    return (
        f"plan {plan.digest()[:12]}: {plan.num_samples} samples, {len(steps)} step(s), "
        f"M = {spans}{', ...' if len(steps) > 8 else ''}, "
        f"{counts.num_dropped_rollouts} rollout(s) dropped{features}"
    )


def _short(metrics: Metrics) -> str:
    parts = [form.format(metrics[k]) for k, form in _SHOWN.items() if metrics.get(k) is not None]
    return "  ".join(parts)
