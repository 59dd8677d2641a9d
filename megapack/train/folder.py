"""The run folder: what a run leaves behind, and the lock that keeps a second process out."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from megapack.base.files import write_whole
from megapack.checkpoint.folders import writing
from megapack.errors import ConfigError, DataError
from megapack.outlook.stats import StepReport
from megapack.plan.plan import Plan
from megapack.ranks import cpu
from megapack.schedule.adapter import StepResult
from megapack.train.trackers import Metrics, Tracker
from megapack.view.records import LENGTHS_FILE, METRICS_FILE, PLAN_FILE, TRACE_FILE

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
# Of file systems that have no locks, Lustre mounted without them for one.
_WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


def lock_folder(folder: Path) -> TextIO:
    """Take a folder until the file that is returned is closed, or the process ends.

    A file system without locks gives a warning and no lock.

    Raises:
        ConfigError: another run has it.
        OSError: the lock file cannot be written.
    """
    path = folder / LOCK_FILE
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    try:
        _lock(file)
        # Between opening and locking another run may have moved the folder away.
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise BlockingIOError
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except BlockingIOError:
        file.close()
        holder = path.read_text(encoding="utf-8").strip() or "another process"
        raise ConfigError(f"{folder} is in use by {holder}; set another name") from None
    except BaseException:
        file.close()
        raise
    return file


def _lock(file: TextIO) -> None:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        logger.warning("%s: no locks here; two runs of one name are not found out", file.name)


class RunFolder:
    """`runs/<name>/`: config.yaml, metrics.jsonl, the last batch's plan.json and lengths.txt, and
    trace.jsonl of traced steps; written by one rank.

    A folder of the same name from an earlier run is kept as `<name>.1`, `<name>.2` and so on.

    Args:
        continue_after: go on in the folder that is there, after this many steps: lines of later
            steps are cut from its files. None = a new folder.

    Raises:
        ConfigError: another run is at work in the folder.
        CheckpointError: by all that writes; the disk refuses it.
    """

    def __init__(self, runs_dir: str, name: str, *, continue_after: int | None = None) -> None:
        self.path = Path(runs_dir) / name
        with writing(self.path), contextlib.ExitStack() as opened:
            if continue_after is None:
                _keep_earlier(self.path)
                self.path.mkdir(parents=True, exist_ok=True)
            opened.enter_context(lock_folder(self.path))
            if continue_after is not None:
                for path in (self.path / METRICS_FILE, self.path / TRACE_FILE):
                    if path.exists():
                        self.write_text(path.name, _lines_until(path, continue_after))
            self._metrics = opened.enter_context(
                open(self.path / METRICS_FILE, "a", encoding="utf-8")
            )
            # Both for the whole run; `close` ends it.
            self._opened = opened.pop_all()
        self.trackers: Sequence[Tracker] = ()
        """What else gets every line of metrics; `close` closes them."""

    def write_text(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        path = self.path / name
        with writing(path):
            write_whole(path, text)

    def write_plan(self, plan: Plan, lengths: Sequence[int]) -> None:
        """The plan of the batch in work, and the tokens of each of its samples, one per line."""
        self.write_text(PLAN_FILE, plan.to_json())
        self.write_text(LENGTHS_FILE, "".join(f"{length}\n" for length in lengths))

    def append_line(self, name: str, values: Mapping[str, Any]) -> None:
        """Add a line of JSON to a file that is written now and then."""
        path = self.path / name
        with writing(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values, allow_nan=False) + "\n")

    def append_metrics(self, metrics: Metrics) -> None:
        """Add a line to metrics.jsonl, and tell the trackers."""
        with writing(self.path / METRICS_FILE):
            self._metrics.write(json.dumps(_finite(metrics), allow_nan=False) + "\n")
            self._metrics.flush()
        for tracker in self.trackers:
            tracker.write(metrics)

    def close(self) -> None:
        """Close metrics.jsonl and the trackers, and let others have the folder; a second call does
        nothing."""
        trackers, self.trackers = self.trackers, ()
        for tracker in trackers:
            tracker.close()
        self._opened.close()


def _lines_until(path: Path, num_steps: int) -> str:
    """The lines of a file of the first steps; a run that was killed may end in half one."""
    kept = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            if json.loads(line)["step"] <= num_steps:
                kept.append(f"{line}\n")
        except (ValueError, TypeError, KeyError):
            raise DataError(f"{path}:{number} is no line of a step; remove it") from None
    return "".join(kept)


def _finite(metrics: Metrics) -> dict[str, float | int | str | None]:
    """JSON has no NaN and no infinity: they become text."""
    return {
        k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
        for k, v in metrics.items()
    }


def _keep_earlier(path: Path) -> None:
    if not path.exists():
        return
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    with lock_folder(path):
        path.rename(kept)
    logger.warning("%s of an earlier run is kept as %s", path, kept)


def training_metrics(result: StepResult) -> dict[str, float]:
    """The loss and the objective's metrics with their units in the key."""
    nats = {"kl_old", "kl_ref", "entropy"}
    named = {f"{k}_nats" if k in nats else k: v for k, v in result.metrics.items()}
    return {"loss": result.loss, **named}


def packing_metrics(step: StepReport) -> dict[str, Any]:
    """How well a step is packed; `docs/metrics.md` says what each key means."""
    return {
        "tokens": step.tokens,
        "num_samples": step.num_samples,
        "num_dropped_rollouts": step.num_dropped_rollouts,
        "num_microbatches_per_rank": step.num_microbatches[1],
        "num_padding_microbatches": step.num_padding_rows,
        "packing_efficiency": step.packing_efficiency,
        "padding_fraction": step.padding_fraction,
        "imbalance": step.imbalance,
        "bubble_fraction": step.bubble_fraction,
        "peak_live_row_tokens_per_gpu": step.peak_live_tokens,
    }


def reset_memory_peaks() -> None:
    """Begin to watch a step's memory; does nothing without CUDA."""
    if cpu.uses_cuda():
        torch.cuda.reset_peak_memory_stats()


def memory_peaks() -> dict[str, float]:
    """Peaks since `reset_memory_peaks` of the GPU that has most; nothing without CUDA.

    A collective over all ranks: pipeline stages hold different amounts.
    """
    if not cpu.uses_cuda():
        return {}
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    most = torch.tensor(peaks, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    allocated, reserved = (most / 2**30).tolist()
    return {"memory_peak_allocated_gib": allocated, "memory_peak_reserved_gib": reserved}


class StepClock:
    """Predicted step seconds.

    Those that were simulated, where the cost model is in seconds. Else simulated units times the
    seconds that a unit took so far in this run, so that the first step has no prediction.
    """

    def __init__(self, *, in_seconds: bool = False) -> None:
        self._in_seconds = in_seconds
        self._measured_s = self._simulated = 0.0

    def predict(self, makespan: float) -> float | None:
        """Seconds that a step of this simulated makespan will take; None where none is known."""
        if self._in_seconds:
            return makespan
        if not self._simulated:
            return None
        return makespan * self._measured_s / self._simulated

    def record(self, makespan: float, measured_s: float) -> None:
        """Learn from a step that ran."""
        self._measured_s += measured_s
        self._simulated += makespan


class Progress:
    """A bar on a terminal, plain lines elsewhere; silent on all ranks but one."""

    def __init__(self, *, active: bool, log_interval: int) -> None:
        self._active, self._interval = active, log_interval
        on_terminal = active and sys.stdout.isatty()
        self._bar = tqdm(unit="step", file=sys.stdout) if on_terminal else None

    def expect(self, num_steps: int, num_done: int = 0) -> None:
        """How many steps the run will take, and has taken before it was resumed."""
        if self._bar is not None:
            self._bar.reset(total=num_steps)
            self._bar.update(num_done)

    def step(self, number: int, metrics: Metrics) -> None:
        """Show one step's metrics."""
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix_str(_short(metrics))
        elif self._active and number % self._interval == 0:
            print(f"step {number}: {_short(metrics)}", flush=True)

    def line(self, text: str) -> None:
        """Show a line above the bar, or as it is."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self._active:
            print(text, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def _short(metrics: Metrics) -> str:
    shown = {
        "loss": "loss {:.4f}",
        "grad_norm": "grad {:.3f}",
        "entropy_nats": "entropy {:.3f}",
        "tokens_per_second": "{:.0f} tokens/s",
        "packing_efficiency": "packed {:.1%}",
        "num_microbatches_per_rank": "M {}",
        "imbalance": "imbalance {:.2f}",
        "step_measured_s": "{:.2f} s",
    }
    parts = [text.format(metrics[k]) for k, text in shown.items() if metrics.get(k) is not None]
    return "  ".join(parts)


def plan_line(plan: Plan) -> str:
    """One line about a batch's plan."""
    steps = plan.steps
    spans = ", ".join(step.counts.microbatch_span for step in steps[:8])
    return (
        f"plan {plan.digest()[:12]}: {plan.num_samples} samples, {len(steps)} step(s), "
        f"M = {spans}{', ...' if len(steps) > 8 else ''}, "
        f"{plan.counts.num_dropped_rollouts} rollout(s) dropped"
    )
