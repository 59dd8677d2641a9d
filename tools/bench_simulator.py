"""Compare the simulator with real steps: fit a cost model, predict, measure.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        tools/bench_simulator.py [--vpp 2]
    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        tools/bench_simulator.py --operations [--vpp 2] [--hybrid]

Steps of equal rows give the measurements: their makespan is a known multiple of one chunk's
forward. The model fitted to them then predicts steps of many unequal rows. Prints each relative
error and their mean. Nothing is asserted, as the seconds depend on the machine.

With --operations each forward, backward and W of the equal steps is timed by itself, on each stage,
and the fitted model has these three numbers and the weights of the stages. It plans one batch under
four policies, and the executor runs them in turn. Stages run the simulated order by construction;
what is compared is each policy's seconds over those of the fixed plan: predicted, with the measured
seconds of its operations in their order, and measured. Operations are timed in seconds of their
thread's CPU, so that the first two also compare on a machine that does other work.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megapack import (
    CostModel,
    Layout,
    Measurement,
    Plan,
    Policy,
    build_dp_schedule,
    launch,
    simulate,
)
from megapack.cost.online import ChunkSeconds, fit_sums, row_sums
from megapack.cost.sizes import ModelSizes
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt import build_model, initialize_parallel
from megapack.loss import SFT
from megapack.pipeline.simulator import Runner
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from megapack.schedule.listeners import Kind, Listener
from megapack.schedule.runner import ScheduleRunner

MODEL = ModelConfig(num_layers=8, hidden_size=128, num_attention_heads=4, num_query_groups=2)
# Attention is on the first of two stages alone, the second is recurrent.
HYBRID_MODEL = dataclasses.replace(
    MODEL,
    hybrid_layer_pattern="*-*-M-M-",
    mamba_num_heads=16,
    mamba_head_dim=16,
    mamba_state_dim=32,
    mamba_num_groups=2,
)
ROUNDS = 5
# Of which a fit begins; any number of this size will do.
CPU_FLOPS = 2e10
# Samples per row and tokens per sample of the steps that the cost model is fitted to.
EQUAL = [(1, 64), (8, 64), (1, 512), (4, 256), (1, 1024), (16, 64), (2, 768)]
# The steps of --operations: short samples and long ones, and what may change.
SHORT_SAMPLES = 40
LONG_SAMPLES = (3000, 1800)
BUDGET = 4096
POLICIES = {
    "fixed": Policy(),
    "split backward": Policy(backward="split"),
    "split samples": Policy(split_samples="auto"),
    "both": Policy(backward="split", split_samples="auto"),
}


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


class Clock(Listener):
    """CPU seconds of the operations of one stage."""

    def __init__(self) -> None:
        self._ended: list[tuple[Kind, float]] = []
        self._began = 0.0

    def on_begin(self, kind: Kind, chunk: int, microbatch: int) -> None:
        self._began = time.thread_time()

    def on_end(self, kind: Kind, chunk: int, microbatch: int) -> None:
        self._ended.append((kind, time.thread_time() - self._began))

    def take(self) -> list[tuple[Kind, float]]:
        """Kind and seconds of the operations since the last call, in their order."""
        ended, self._ended = self._ended, []
        return ended

    def medians(self) -> list[float]:
        """The median seconds of each kind since the last call; 0 for a kind that did not run."""
        ended = self.take()
        return [statistics.median([t for k, t in ended if k == kind] or [0.0]) for kind in "FBW"]


def batch_of(lengths: list[int]) -> SampleBatch:
    """Samples of random tokens, each with a prompt of one token."""
    tokens = [torch.randint(0, 256, (n,)) for n in lengths]
    return SampleBatch.from_prompt_response([t[:1] for t in tokens], [t[1:] for t in tokens], {})


# A plan of one step, and the lengths that it was made for.
Case = tuple[Plan, list[int]]


def rounds_of(
    adapter: TimedAdapter, cases: list[Case], read: Callable[[], Any], num_rounds: int = ROUNDS
) -> list[list[Any]]:
    """What `read` returns after each case's step, for every round after a warm-up round.

    A round runs every case once, so that a slow period of the machine slows down all cases.
    """
    batches = [(plan, batch_of(lengths)) for plan, lengths in cases]
    rounds = []
    for _ in range(num_rounds + 1):
        found = []
        for plan, batch in batches:
            for chunk in adapter.chunks:
                chunk.zero_grad_buffer()
            adapter.step(plan, batch, objective=SFT())
            found.append(read())
        rounds.append(found)
    return rounds[1:]


def measured(adapter: TimedAdapter, cases: list[Case]) -> list[float]:
    """Median seconds of each case's step."""
    rounds = rounds_of(adapter, cases, lambda: adapter.runner.seconds)
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def equal_cases(layout: Layout, policy: Policy | None = None) -> list[Case]:
    """A step for each pair in EQUAL; all its rows hold `num` samples of `length` tokens."""
    cases = []
    for num, length in EQUAL:
        lengths = [length] * (num * 4 * layout.group_size)
        plan = build_dp_schedule(lengths, layout=layout, micro_batch_size=num, policy=policy)
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


def compare_steps(chunks: Sequence[Any], layout: Layout, say: Callable[[str], None]) -> None:
    """Predict and measure steps of unequal rows in Megatron's order."""
    equal, unequal = equal_cases(layout), unequal_cases(layout)
    seconds = measured(TimedAdapter(chunks, layout=layout), equal + unequal)
    known = measurements(layout, equal, seconds[: len(equal)])
    cost = CostModel.fit(known, layout=layout)
    say(f"pp2 vpp{layout.vpp}: {cost.to_json()}")
    errors = []
    for (plan, _), real in zip(unequal, seconds[len(equal) :], strict=True):
        predicted = simulate(plan.steps[0], layout=layout, cost=cost).makespan
        errors.append(predicted / real - 1)
        say(
            f"  M={plan.steps[0].num_microbatches}: predicted {predicted:.3f} s, "
            f"measured {real:.3f} s, error {errors[-1]:+.1%}"
        )
    say(f"  mean absolute error {statistics.mean(map(abs, errors)):.1%}")


def operation_cost(adapter: TimedAdapter, layout: Layout, sizes: ModelSizes) -> CostModel:
    """A cost model fitted to single operations of equal steps, on all stages.

    Joint steps give seconds of forwards and whole backwards, split ones those of W's. Stages of
    other layers are fitted as a run that calibrates itself does.
    """
    clock = Clock()
    adapter.runner.listeners.append(clock)
    joint = equal_cases(layout)
    split = equal_cases(layout, Policy(backward="split"))
    rounds = torch.tensor(rounds_of(adapter, joint + split, clock.medians))
    adapter.runner.listeners.remove(clock)
    # float [stages, cases, 3], the least of all rounds: other work on a machine adds seconds.
    stages = [torch.empty_like(rounds[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(stages, rounds.amin(dim=0))
    seconds = torch.stack(stages)
    forward, backward = seconds[:, : len(EQUAL), 0], seconds[:, : len(EQUAL), 1]
    weight = seconds[:, len(EQUAL) :, 2]
    start = CostModel.from_model(sizes, layout=layout, flops_per_gpu=CPU_FLOPS, mean_length=300.0)
    if start.square_factors is not None:
        rows = [
            ChunkSeconds(stage, row)
            for stage in range(layout.pp)
            for row in _rows(forward[stage], backward[stage], weight[stage])
        ]
        return fit_sums(row_sums(rows, start, layout), start, layout)
    means = (seconds.mean(dim=0) for seconds in (forward, backward, weight))
    cost = CostModel.fit(_rows(*means), layout=layout)
    busy = (forward + backward).sum(dim=1)
    weights = (busy / busy.mean()).tolist()
    return dataclasses.replace(cost, stage_weights=tuple(weights * layout.vpp))


def replayed(plan: Plan, layout: Layout, own: list[list[float]]) -> float:
    """Seconds of a step whose operations take the least of their measured seconds.

    Args:
        own: per round, seconds of this stage's operations.
    """
    mine = torch.tensor(own).amin(dim=0)
    stages = [torch.empty_like(mine) for _ in range(layout.pp)]
    dist.all_gather(stages, mine)
    order = plan.steps[0].order(0, layout)
    seconds = np.empty(order.stage.size)
    for stage, values in enumerate(stages):
        seconds[order.stage == stage] = values
    return float(Runner(layout, CostModel()).timeline(order, seconds).end.max())


def _rows(forward: Tensor, backward: Tensor, weight: Tensor) -> list[Measurement]:
    """Seconds of one stage, or of the mean stage, in each equal step."""
    return [
        Measurement(num * length, num * length**2, num, f, b, weight_seconds=min(w, b))
        for (num, length), f, b, w in zip(
            EQUAL, forward.tolist(), backward.tolist(), weight.tolist(), strict=True
        )
    ]


def compare_operations(
    chunks: Sequence[Any], layout: Layout, sizes: ModelSizes, say: Callable[[str], None]
) -> None:
    """Predict and measure what split samples and split backwards gain."""
    adapter = TimedAdapter(chunks, layout=layout, executor="operations")
    cost = operation_cost(adapter, layout, sizes)
    say(f"pp2 vpp{layout.vpp}: {cost.to_json()}")
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 0.8, SHORT_SAMPLES), 8, 500).astype(int).tolist()
    lengths += LONG_SAMPLES
    plans = {
        name: build_dp_schedule(
            lengths, layout=layout, max_tokens_per_gpu=BUDGET, cost=cost, policy=policy
        )
        for name, policy in POLICIES.items()
    }
    clock = Clock()
    adapter.runner.listeners.append(clock)
    cases = [(plan, lengths) for plan in plans.values()]
    rounds = rounds_of(adapter, cases, lambda: (adapter.runner.seconds, clock.take()))
    predicted = [simulate(p.steps[0], layout=layout, cost=cost).makespan for p in plans.values()]
    errors = []
    replays = []
    for k, (name, plan) in enumerate(plans.items()):
        real = statistics.median(found[k][0] for found in rounds)
        own = [[seconds for _, seconds in found[k][1]] for found in rounds]
        replays.append(replayed(plan, layout, own))
        # Ratios of neighbours in time: a slow period of the machine slows down both.
        ratio = statistics.median(found[k][0] / found[0][0] for found in rounds)
        wanted = predicted[k] / predicted[0]
        of_operations = replays[k] / replays[0]
        step = plan.steps[0]
        say(
            f"  {name}: M={step.num_microbatches}, {step.counts.num_pieces} pieces, predicted "
            f"{predicted[k]:.3f} s, of operations {replays[k]:.3f} s "
            f"({predicted[k] / replays[k] - 1:+.1%}), measured {real:.3f} s; over fixed: predicted "
            f"{wanted:.3f}, of operations {of_operations:.3f} ({wanted / of_operations - 1:+.1%}), "
            f"measured {ratio:.3f}"
        )
        errors.append(wanted / of_operations - 1)
    say(f"  mean absolute error of the ratios {statistics.mean(map(abs, errors[1:])):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vpp", type=int, default=1)
    parser.add_argument("--operations", action="store_true")
    parser.add_argument("--hybrid", action="store_true", help="stages of two kinds, vpp=1")
    options = parser.parse_args()
    if options.hybrid and (options.vpp > 1 or not options.operations):
        parser.error("--hybrid needs --operations and --vpp 1")
    model = HYBRID_MODEL if options.hybrid else MODEL
    launch.quiet_known_warnings()
    launch.start("cpu")
    layout = Layout(pp=dist.get_world_size(), vpp=options.vpp)
    torch.manual_seed(0)
    initialize_parallel(layout, 0)
    chunks = build_model(
        model,
        layout,
        vocab_size=256,
        seed=0,
        distributed_optimizer=False,
        splits_backward=options.operations,
    )
    say = print if dist.get_rank() == 0 else lambda *_: None
    if options.operations:
        compare_operations(chunks, layout, model, say)
    else:
        compare_steps(chunks, layout, say)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
