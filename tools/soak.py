"""Train twice on this machine's CPU, once undisturbed and once with faults, and compare.

    python tools/soak.py [--steps 2000] [--faults 28] [--kinds KIND ...] [--seed 0] [--world 4]
                         [--out runs/soak] [--write]

Faults kill or suspend a rank, signal the job to stop, fill the disk, or kill the job with a
checkpoint half written. A job that ended is started again with train.resume=auto. At the end every
step's numbers must equal those of the undisturbed run, digit by digit, and memory, threads, files
and process groups must not have grown. Prints tables; --write also writes docs/measured/soak.md if
all checks pass. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.pages.marks import table
from tools.pages.measured import versions, write
from tools.soaking.faults import KINDS, Fault, draw, due
from tools.soaking.job import Job, Sample
from tools.soaking.judge import fault_table, judge_counts, judge_memory, judge_steps, summary

LAYOUTS = {
    1: ("layout.dp=1", "layout.pp=1", "layout.vpp=1"),
    2: ("layout.dp=1", "layout.pp=2", "layout.vpp=2"),
    4: ("layout.dp=2", "layout.pp=2", "layout.vpp=2"),
}
MODEL = ("model.hidden_size=32", "model.num_attention_heads=2", "model.num_query_groups=1")
# Limits on the time to the next step, and from a fault to the job's end. A step takes a fraction of
# a second, a start on a busy machine half a minute.
STEP_TIMEOUT_S = 180.0
END_TIMEOUT_S = 90.0
_POLL_S = 0.02
_WHAT = (
    "Two runs of the main job on this machine's CPU: one with faults on a schedule, which resumes\n"
    "after each, and one without."
)


class SoakFailed(Exception):
    """A run did not end or resume as its faults require."""


class Soak:
    """One training run. Each fault that ends the job makes it start again: a new life.

    Args:
        folder: an empty folder.
        faults: in order; empty for the undisturbed run.
    """

    def __init__(self, folder: Path, args: argparse.Namespace, faults: Sequence[Fault]) -> None:
        self.folder = folder
        self.world = args.world
        self.settings = settings(args)
        self.num_steps = args.steps
        self.save_interval = save_interval(args.steps)
        self.sample_interval = max(1, args.steps // 200)
        self.waiting = list(faults)
        self.struck: list[dict[str, Any]] = []
        """A record of each fault: when it struck, and how the job ended and resumed."""
        self.samples: list[Sample] = []
        self.deadline = time.monotonic() + args.timeout_s
        self._start_s = 20.0

    def run(self) -> None:
        """Start the job until the run is complete.

        Raises:
            SoakFailed: the job hangs, or ends in another way than its fault requires.
        """
        self.folder.mkdir(parents=True)
        for life in range(len(self.waiting) + 1):
            job = Job(self.folder, life, self.world, self.settings)
            try:
                finished = self._live(job)
                left = job.left_behind()
            finally:
                job.kill()
            if left:
                raise SoakFailed(f"life {life} left processes {left} behind:\n{_tail(job)}")
            if finished:
                return

    def _live(self, job: Job) -> bool:
        """Run one life; True if the run is complete."""
        changed = time.monotonic()
        sampled = 0
        step = 0
        while job.running():
            now = time.monotonic()
            if job.last_step != step:
                self._start_s = self._start_s if step else now - job.started
                changed = now
                step = job.last_step
                self._note_resume(job)
            if now - changed > STEP_TIMEOUT_S or now > self.deadline:
                raise SoakFailed(f"no step after step {step} of life {job.life}:\n{_tail(job)}")
            # After the last step the ranks free their resources, so a sample would be too low.
            if step // self.sample_interval > sampled and step < self.num_steps:
                sampled = step // self.sample_interval
                self._keep(job.samples())
            if self.waiting and due(self.waiting[0], job, self._start_s):
                if self._strike(job, self.waiting.pop(0)):
                    return False
                changed = time.monotonic()
            time.sleep(_POLL_S)
        if job.launcher.returncode:
            raise SoakFailed(f"life {job.life} ended by itself:\n{_tail(job)}")
        return True

    def _keep(self, samples: list[Sample]) -> None:
        self.samples += samples
        with open(self.folder / "samples.jsonl", "a") as file:
            file.writelines(f"{json.dumps(dataclasses.asdict(one))}\n" for one in samples)

    def _strike(self, job: Job, fault: Fault) -> bool:
        """Strike, and wait for the job's end if the fault ends it; True if it did."""
        kind = KINDS[fault.kind]
        record = {"life": job.life, "kind": fault.kind, "rank": fault.rank}
        record |= {"step": job.last_step, "exit_code": None}
        self.struck.append(record)
        started = time.monotonic()
        kind.strike(job, fault)
        record["seconds"] = time.monotonic() - started
        while kind.ends and job.running():
            if time.monotonic() - started > END_TIMEOUT_S:
                raise SoakFailed(f"{fault.kind}: runs on after {END_TIMEOUT_S} s:\n{_tail(job)}")
            time.sleep(_POLL_S)
        job.running()
        record |= {"step": job.last_step, "exit_code": job.launcher.poll()}
        if kind.ends:
            record["seconds"] = time.monotonic() - started
            self._check_end(job, fault)
        return kind.ends

    def _check_end(self, job: Job, fault: Fault) -> None:
        kind = KINDS[fault.kind]
        code = job.launcher.returncode
        if code == 0 or kind.exit_code not in (None, code):
            raise SoakFailed(f"{fault.kind}: ended with {code}:\n{_tail(job)}")
        if not re.search(kind.says, job.output()):
            raise SoakFailed(f"{fault.kind}: output lacks {kind.says!r}:\n{_tail(job)}")

    def _note_resume(self, job: Job) -> None:
        """Record and check at which step a new life resumes after the last fault."""
        resumed = job.first_step - 1
        # A life that was killed while starting has printed no step.
        latest = max((one["step"] for one in self.struck), default=0)
        for one in self.struck:
            if one["exit_code"] is None or "resumed" in one:
                continue
            one["resumed"] = resumed
            lost = 0 if KINDS[one["kind"]].saves else self.save_interval
            if latest - resumed > lost:
                raise SoakFailed(
                    f"{one['kind']} after step {latest}: resumed after step {resumed}, "
                    f"at most {lost} steps may be lost"
                )


def save_interval(num_steps: int) -> int:
    """Optimizer steps between checkpoints; odd, so that some fall inside a batch of two steps."""
    return max(5, num_steps // 160 * 2 + 1)


def settings(args: argparse.Namespace) -> list[str]:
    """Overrides that give the tiny config's run this many steps: two epochs of two-step batches."""
    num_samples = args.steps // 4 * 16
    return [
        *("name=run", f"data.num_generated={num_samples}", "data.shuffle=true", "train.epochs=2"),
        *("data.prompts_per_batch=4", "plan.global_batch_size=8", "plan.max_tokens_per_gpu=512"),
        *MODEL,
        *LAYOUTS[args.world],
        *("train.resume=auto", f"train.save_interval={save_interval(args.steps)}"),
        *args.set,
    ]


def _tail(job: Job) -> str:
    return job.output()[-3000:]


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.steps % 4 or args.steps < 8 * save_interval(args.steps):
        print("soak: --steps must be a multiple of 4, and 40 or more", file=sys.stderr)
        return 2
    shutil.rmtree(args.out, ignore_errors=True)
    faults = draw(
        args.seed, args.faults, args.steps, save_interval(args.steps), args.world, args.kinds
    )
    calm = Soak(args.out / "undisturbed", args, ())
    wild = Soak(args.out / "disturbed", args, faults)
    try:
        for run in (calm, wild):
            started = time.monotonic()
            run.run()
            print(f"{run.folder.name}: {time.monotonic() - started:.0f} s", flush=True)
    except SoakFailed as error:
        print(f"{fault_table(wild.struck)}\nFAILED: {error}")
        return 1
    print(fault_table(wild.struck))
    failed = [f"{len(wild.waiting)} faults did not strike"] if wild.waiting else []
    failed += judge_steps(calm.folder, wild.folder, args.steps)
    for run in (calm, wild):
        failed += judge_counts(run.folder.name, run.samples)
    failed += judge_memory(calm.samples, args.steps)
    print("\n".join(f"FAILED: {text}" for text in failed) or "all holds")
    if args.write and not failed:
        rows = summary(wild.struck, calm.samples, args.steps)
        lines = table(["what", "figure"], rows).splitlines()
        print(write("soak", "Soak", _WHAT, lines, versions("megatron-core", "torch")))
    return int(bool(failed))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    found.add_argument("--steps", type=int, default=2000, help="optimizer steps, a multiple of 4")
    found.add_argument("--faults", type=int, default=28)
    found.add_argument("--kinds", nargs="+", choices=KINDS, default=(), help="of faults")
    found.add_argument("--seed", type=int, default=0, help="of the faults")
    found.add_argument("--world", type=int, choices=LAYOUTS, default=4, help="ranks")
    found.add_argument("--out", type=Path, default=Path("runs/soak"), help="replaced if it exists")
    found.add_argument(
        "--set", nargs="+", default=(), metavar="section.key=value", help="settings of the run"
    )
    found.add_argument("--write", action="store_true", help="write docs/measured/soak.md")
    found.add_argument("--timeout-s", type=float, default=3600.0, help="of each of the two runs")
    return found


if __name__ == "__main__":
    sys.exit(main())
