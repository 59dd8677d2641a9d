"""Compare the simulator with real steps: fit a cost model, predict, measure.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        tools/bench_simulator.py [--vpp 2]

Steps of equal rows give the measurements: their makespan is a known multiple of one chunk's
forward. The model fitted to them then predicts steps of many unequal rows. The error of each step
and their mean go to docs/measured/planner_simulator_*.md. Nothing is asserted, as the seconds
depend on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import (
    CostModel,
    Layout,
    Measurement,
    Plan,
    build_dp_schedule,
    launch,
    simulate,
)
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt import build_model, initialize_parallel
from megapack.loss import SFT
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from megapack.schedule.runner import ScheduleRunner
from tools.bench_planner import machine
from tools.pages import measured

MODEL = ModelConfig(num_layers=8, hidden_size=128, num_attention_heads=4, num_query_groups=2)
ROUNDS = 5
# Samples per row and tokens per sample of the steps that the cost model is fitted to.
EQUAL = [(1, 64), (8, 64), (1, 512), (4, 256), (1, 1024), (16, 64), (2, 768)]


class TimedRunner(ScheduleRunner):
    """Measures the schedule alone, without packing and agreement."""

    seconds = 0.0
    """Seconds of the last step, on the slowest rank."""

    def run_schedule(self, *args: Any) -> None:
        dist.barrier()
        started = time.perf_counter()
        super().run_schedule(*args)
        seconds = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.seconds = float(seconds)


class TimedAdapter(ScheduleAdapter):
    """An adapter whose steps are timed."""

    runner_class = TimedRunner


def batch_of(lengths: list[int]) -> SampleBatch:
    """Samples of random tokens, each with a prompt of one token."""
    tokens = [torch.randint(0, 256, (n,)) for n in lengths]
    return SampleBatch.from_prompt_response([t[:1] for t in tokens], [t[1:] for t in tokens], {})


# A plan of one step, and the lengths that it was made for.
Case = tuple[Plan, list[int]]


def step_seconds(adapter: TimedAdapter, cases: list[Case]) -> list[float]:
    """Median seconds of each case's step over rounds, after a round of warm-up.

    A round runs every case once, so that a slow period of the machine slows down all cases.
    """
    batches = [(plan, batch_of(lengths)) for plan, lengths in cases]
    rounds = []
    for _ in range(ROUNDS + 1):
        seconds = []
        for plan, batch in batches:
            for chunk in adapter.chunks:
                chunk.zero_grad_buffer()
            adapter.step(plan, batch, objective=SFT())
            seconds.append(adapter.runner.seconds)
        rounds.append(seconds)
    return [statistics.median(column) for column in zip(*rounds[1:], strict=True)]


def equal_cases(layout: Layout) -> list[Case]:
    """A step for each pair in EQUAL; all its rows hold `num` samples of `length` tokens."""
    cases = []
    for num, length in EQUAL:
        lengths = [length] * (num * 4 * layout.group_size)
        plan = build_dp_schedule(lengths, layout=layout, micro_batch_size=num)
        cases.append((plan, lengths))
    return cases


def unequal_cases(layout: Layout) -> list[Case]:
    """Steps of lognormal lengths with three budgets."""
    rng = np.random.default_rng(0)
    cases = []
    for budget in (512, 1024, 2048):
        lengths = np.clip(rng.lognormal(5, 0.8, 48), 8, 500).astype(int).tolist()
        plan = build_dp_schedule(lengths, layout=layout, max_tokens_per_gpu=budget)
        cases.append((plan, lengths))
    return cases


def measurements(layout: Layout, cases: list[Case], seconds: list[float]) -> list[Measurement]:
    """Seconds of one chunk's forward in each equal step, which takes a known multiple of them."""
    unit = CostModel(fixed=1.0)
    multiples = [simulate(plan.steps[0], layout=layout, cost=unit).makespan for plan, _ in cases]
    return [
        Measurement(num * length, num * length**2, num, taken / multiple)
        for (num, length), taken, multiple in zip(EQUAL, seconds, multiples, strict=True)
    ]


def compare_steps(chunks: Sequence[Any], layout: Layout) -> Iterator[str]:
    """Predict and measure steps of unequal rows in Megatron's order: the lines of a table."""
    equal, unequal = equal_cases(layout), unequal_cases(layout)
    seconds = step_seconds(TimedAdapter(chunks, layout=layout), equal + unequal)
    known = measurements(layout, equal, seconds[: len(equal)])
    cost = CostModel.fit(known, layout=layout)
    yield "| M | predicted, s | measured, s | error |"
    yield "|---|---|---|---|"
    errors = []
    for (plan, _), real in zip(unequal, seconds[len(equal) :], strict=True):
        predicted = simulate(plan.steps[0], layout=layout, cost=cost).makespan
        errors.append(100 * (predicted / real - 1))
        count = plan.steps[0].num_microbatches
        yield f"| {count} | {predicted:.3f} | {real:.3f} | {errors[-1]:+.1f} % |"
    yield f"| mean absolute error | | | {statistics.mean(map(abs, errors)):.1f} % |"


def write(layout: Layout, lines: list[str]) -> None:
    """Write the layout's file of docs/measured."""
    vpp = f" vpp{layout.vpp}" if layout.vpp > 1 else ""
    measured.write(
        f"planner_simulator_pp{layout.pp}{vpp.replace(' ', '_')}",
        f"The simulator against real steps, pp{layout.pp}{vpp}",
        "Megatron's steps of unequal rows on CPUs, predicted by a cost model that was fitted to\n"
        f"steps of equal rows: {layout.pp} processes, {MODEL.num_layers} layers of width "
        f"{MODEL.hidden_size}.",
        lines,
        f"megatron-core {version('megatron-core')}, torch {torch.__version__}, {machine()}",
        command=f"python -m torch.distributed.run --standalone --nproc-per-node {layout.pp} "
        f"tools/bench_simulator.py --vpp {layout.vpp}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vpp", type=int, default=1)
    options = parser.parse_args()
    launch.quiet_known_warnings()
    launch.start("cpu")
    layout = Layout(pp=dist.get_world_size(), vpp=options.vpp)
    torch.manual_seed(0)
    initialize_parallel(layout, 0)
    chunks = build_model(MODEL, layout, vocab_size=256, seed=0, distributed_optimizer=False)
    lines = list(compare_steps(chunks, layout))
    if dist.get_rank() == 0:
        print("\n".join(lines))
        write(layout, lines)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
