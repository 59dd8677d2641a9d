"""The main job with a fault on one rank in one phase; each rank writes the error that it raises.

torchrun --nproc-per-node 4 -m tests.dist.ranks.rank_fault_worker \
    OUT_DIR FAULT PHASE RANK [overrides]

With plan.context_parallel=dynamic, DP ranks share the micro-batch in which a fault of a forward or
backward happens.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megapack.schedule.call
from megapack.config import load_config
from megapack.errors import DataError
from megapack.job.checkpoint import state
from megapack.job.config.sections import TrainConfig
from megapack.job.train import job, learner, passes
from megapack.job.train.calibrator import Calibrator
from megapack.job.train.folder import RunFolder
from megapack.model.attention import sdpa
from megapack.ranks.interrupt import Interrupt
from megapack.schedule import adapter
from megapack.schedule.call import StepCall
from megapack.schedule.faults import FiniteFlags
from megapack.schedule.forward import ForwardStep, LastStage
from megapack.schedule.listeners import Kind, Listener
from megapack.schedule.runner import ScheduleRunner
from tests.dist.spawn import ROOT
from tests.made_rows import with_shared_rows

CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
SETTINGS = [
    *("name=run", "data.num_generated=32", "data.prompts_per_batch=4", "plan.global_batch_size=8"),
    *("model.num_layers=4", "model.hidden_size=32", "plan.search=64", "objective.kl_coef=0.0"),
    "plan.share_prefixes=off",
]
PHASES = ("plan", "pack", "forward", "backward", "reduction", "output")
WEIGHTS = "weight_gradients"
"""A phase of a step with plan.backward=split."""
CALIBRATION = "calibration"
"""A fit of the cost model, with plan.calibrate=online."""
LAYER = "layer"
"""Between the layers of a row that ranks share: before they gather keys for the second time."""
ELSEWHERE = ("start", "prefetch", "write_plan", "optimizer", "checkpoint", WEIGHTS, CALIBRATION)
"""Phases outside of a step, or not of all steps; they are not in the matrix."""
ON_RANK_0 = ("write_plan",)
FAULTS = ("bad_sample", "out_of_memory", "user_error", "nan", "killed")
OTHER_SHARERS = "other_sharers"
"""A rank plans that DP ranks share fewer micro-batches. Only plans with context_parallel="dynamic"
can differ in that."""
STOPPED = "stopped"
IN_ONE_PHASE = {OTHER_SHARERS: "plan", STOPPED: "forward"}
"""Faults that are not in the matrix, and where they happen."""
SIGNALS = {
    "killed": signal.SIGKILL,
    STOPPED: signal.SIGSTOP,
    "terminated": signal.SIGTERM,
}
AT_STEP = 2
"""The fault happens after this many steps."""
AT_MICROBATCH = 1
NAN = float("nan")
_NO_GPU_HAS_BYTES = 1 << 50


class Trigger:
    """Makes a fault happen once, on one rank, when it is due."""

    def __init__(self, folder: Path, fault: str, rank: int) -> None:
        self.folder = folder
        self.fault = fault
        self.is_due = False
        self.is_own = rank == int(os.environ["RANK"])

    def fires(self) -> bool:
        """Whether the fault happens now; if so, its time is written."""
        if not (self.is_own and self.is_due):
            return False
        self.is_due = False
        (self.folder / "injected").write_text(str(time.time()), encoding="utf-8")
        return True

    def __call__(self) -> None:
        """Raise the fault's error or send its signal, if it is due."""
        if not self.fires():
            return
        if self.fault in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.fault])
            return
        if self.fault == "bad_sample":
            raise DataError("sample 3 has no tokens; leave it out of the batch")
        if self.fault == "out_of_memory":
            # A rehearsal believes in a GPU and has none.
            if torch.cuda.is_available() and torch.empty(0, device="cuda").is_cuda:
                torch.empty(_NO_GPU_HAS_BYTES, dtype=torch.uint8, device="cuda")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        raise ValueError("the user's own code failed")


def inject(trigger: Trigger, phase: str) -> None:
    """Put the fault into one phase of the job, or into its losses."""
    _count_steps(trigger)
    is_nan = trigger.fault == "nan"
    if trigger.fault == OTHER_SHARERS:
        return
    if phase in ELSEWHERE and phase != WEIGHTS:
        _inject_elsewhere(trigger, phase)
    elif phase == "plan" and is_nan:
        _around(job.Trainer, "_planned", after=lambda batch: _poisoned_batch(batch, trigger))
    elif phase == "plan":
        _around(job.Trainer, "_planned", before=trigger)
    elif phase == "pack" and is_nan:
        _around(
            megapack.schedule.call,
            "sample_weights",
            after=lambda values: _poisoned(values, trigger),
        )
    elif phase == "pack":
        _around(adapter, "pack_row", before=trigger)
    elif phase == "forward" and is_nan:
        _around(ForwardStep, "run_row", after=lambda result: _poisoned_forward(result, trigger))
    elif phase == "backward" and is_nan:
        _around(ForwardStep, "run_row", after=lambda result: _poisoned_backward(result, trigger))
    elif phase in ("forward", "backward", WEIGHTS, "log-probs"):
        _around(ScheduleRunner, "run", before=lambda *call: _listen(call[0], phase, trigger))
    elif phase == LAYER:
        _around(sdpa, "gather_rows", before=_SecondTime(trigger))
    elif phase == "critic":
        _around(job.Critic, "step", before=_listen_to_critic(trigger))
    elif phase == "loss":
        _around(LastStage, "__call__", before=lambda *_: torch.is_grad_enabled() and trigger())
    elif phase == "reduction" and is_nan:
        _around(FiniteFlags, "check_gradients", before=lambda *a: _poison_buffers(a, trigger))
    elif phase == "reduction":
        _around(FiniteFlags, "check_gradients", before=trigger)
    elif is_nan:
        _around(adapter, "reduce_metrics", after=lambda sums: _poisoned_loss(sums, trigger))
    else:
        _around(adapter, "reduce_metrics", before=trigger)


def share_micro_batches(trigger: Trigger) -> None:
    """Let DP ranks share the micro-batches of faults in all plans of the job's steps: a NaN begins
    in the first one.

    OTHER_SHARERS gives a rank the plan in which only the first one is shared.
    """
    plan_steps = passes.plan_steps
    with_fewer: dict[str, Any] = {}

    def shared(config: Any, layout: Any, cost: Any, lengths: Any, *others: Any) -> Any:
        plan = plan_steps(config, layout, cost, lengths, *others)
        for place in (0, AT_MICROBATCH):
            fewer = plan
            plan = with_shared_rows(plan, lengths, place)
            everyone = [rank[place] for step in plan.steps for rank in step.ranks]
            assert all(row.width > 1 for row in everyone), "no rank shares the micro-batch"
        with_fewer[plan.digest()] = fewer
        return plan

    def of_others(batch: Any) -> Any:
        if not trigger.fires():
            return batch
        fewer = with_fewer[batch.plan.digest()]
        return dataclasses.replace(batch, plan=fewer, forward_plan=fewer)

    passes.plan_steps = shared
    if trigger.fault == OTHER_SHARERS:
        _around(job.Trainer, "_planned", after=of_others)


def _inject_elsewhere(trigger: Trigger, phase: str) -> None:
    def with_trigger(optimizer: Any) -> Any:
        _around(optimizer, "step", before=trigger)
        return optimizer

    trigger.is_due = phase == "start"
    if phase == "start":
        _around(learner, "build_optimizer", before=trigger)
    elif phase == "prefetch":
        # The first step of a batch has no step before it in which it could be prepared.
        _around(StepCall, "rows", before=lambda call, *_: _is_next(call) and trigger())
    elif phase == "optimizer":
        _around(learner, "build_optimizer", after=with_trigger)
    elif phase == CALIBRATION:
        _around(Calibrator, "_fit", before=trigger)
    elif phase == "checkpoint":
        _around(state, "_write_tensors", before=trigger)
    else:
        _around(RunFolder, "write_plan", before=trigger)


def _count_steps(trigger: Trigger) -> None:
    def due(trainer: Any, *_: Any) -> None:
        trigger.is_due = trigger.is_due or trainer.num_steps == AT_STEP

    _around(job.Trainer, "_train_on", before=due)
    _around(job.Trainer, "_step", before=due)


def _around(
    owner: Any,
    name: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[[Any], Any] | None = None,
) -> None:
    inner = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args) if not isinstance(before, Trigger) else before()
        result = inner(*args, **kwargs)
        return result if after is None else after(result)

    setattr(owner, name, outer)


def _is_next(call: StepCall) -> bool:
    return call.is_training and call.step > 0


class _SecondTime:
    """Triggers the fault when it is called for the second time in a step's training pass."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger
        self._calls = 0

    def __call__(self, *_: Any) -> None:
        if self._trigger.is_due and torch.is_grad_enabled():
            self._calls += 1
            if self._calls == 2:
                self._trigger()


def _poisoned(values: Any, trigger: Trigger) -> Any:
    return values * NAN if trigger.fires() else values


def _poisoned_batch(batch: passes.PlannedBatch, trigger: Trigger) -> passes.PlannedBatch:
    if trigger.fires():
        samples = batch.samples
        advantages = [samples.field("advantages", i) * NAN for i in range(len(samples))]
        samples.set_field("advantages", advantages)
    return batch


def _poisoned_forward(result: Any, trigger: Trigger) -> Any:
    output, head = result
    return (output * NAN, head) if trigger.fires() else result


def _poisoned_backward(result: Any, trigger: Trigger) -> Any:
    if result[0].requires_grad and trigger.fires():
        result[0].register_hook(lambda gradient: gradient * NAN)
    return result


def _poison_buffers(args: Any, trigger: Trigger) -> None:
    if trigger.fires():
        args[1][0][0].fill_(NAN)


def _poisoned_loss(sums: dict[str, float], trigger: Trigger) -> dict[str, float]:
    return {**sums, "loss": NAN} if trigger.fires() else sums


def _listen(runner: ScheduleRunner, phase: str, trigger: Trigger) -> None:
    if not any(isinstance(listener, _Faulty) for listener in runner.listeners):
        runner.listeners.append(_Faulty(phase, trigger))


def _listen_to_critic(trigger: Trigger) -> Callable[..., None]:
    return lambda critic, *_: _listen(critic.adapter.runner, "backward", trigger)


class _Faulty(Listener):
    """Triggers the fault when a forward or backward begins."""

    def __init__(self, phase: str, trigger: Trigger) -> None:
        # Kind, and whether gradients are enabled: passes for log-probs run forwards too.
        phases = {
            "forward": ("F", True),
            "backward": ("B", False),
            WEIGHTS: ("W", True),
            "log-probs": ("F", False),
        }
        self._wanted = phases[phase]
        self._trigger = trigger

    def on_begin(self, kind: Kind, chunk: int, microbatch: int) -> None:
        if microbatch == AT_MICROBATCH and (kind, torch.is_grad_enabled()) == self._wanted:
            self._trigger()


def main(out_dir: str, fault: str, phase: str, rank: str, *overrides: str) -> int:
    """Run the job; returns the exit code of the command."""
    folder = Path(out_dir)
    trigger = Trigger(folder, fault, int(rank))
    inject(trigger, phase)
    config = load_config(CONFIG, [*SETTINGS, f"runs_dir={folder}/runs", *overrides], TrainConfig)
    if config.plan.context_parallel == "dynamic":
        share_micro_batches(trigger)
    report = {"error": "", "notes": "", "cause": ""}
    code = 0
    with Interrupt(saves=config.train.save_interval is not None) as interrupt:
        try:
            job.train(config, interrupt)
        except Exception as error:
            code = getattr(error, "exit_code", 70)
            report["error"] = f"{type(error).__name__}: {error}"
            report["notes"] = "\n".join(getattr(error, "__notes__", ()))
            report["cause"] = "".join(traceback.format_exception(error))
    report["time"] = str(time.time())
    path = folder / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
