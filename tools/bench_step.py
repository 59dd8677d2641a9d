"""Times a training step on the same samples: one per micro-batch, padded dense, and packed.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        tools/bench_step.py [--rollouts FILE.jsonl] [--markdown OUT.md]
    OMP_NUM_THREADS=1 python tools/bench_step.py --groups 8 --prompt 512 --response 512
    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        tools/bench_step.py --long 4096
    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        tools/bench_step.py --executors

All ways run in turn, in one process group and on one model. The table gives the median over rounds
of each way's time divided by that of packed rows with planned shapes in the same round. A padded
dense batch is a row whose samples are all padded to the longest sample of the micro-batch;
attention then runs as one [B, heads, S, d] batch.

With `--groups G`, prompts have G responses each, and rows that hold a prompt once are compared with
rows that hold it G times, under one budget. One process runs the whole model, two run pp2 x vpp2.

With `--long N`, a batch of one sample of N tokens and many short ones is planned with
context_parallel="fixed" and "dynamic". Two processes run dp2, four dp2 x pp2; give each a core.

With `--executors`, one plan runs in Megatron's schedules and as the list of their operations. One
process runs the whole model, two run pp2 and pp2 x vpp2, four pp4 and pp4 x vpp2.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megapack import (
    CostModel,
    Layout,
    Plan,
    Policy,
    SharedPrefixes,
    build_dp_schedule,
    launch,
)
from megapack.base.choices import Executor
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.job.config.sections import ModelConfig
from megapack.job.data.dataset import Dataset
from megapack.job.data.generated import generate_rollouts
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.data.tokenizer import ByteTokenizer, Ids
from megapack.job.gpt import build_model, initialize_parallel
from megapack.loss import SFT
from megapack.pipeline import simulate_planned
from megapack.policy import ContextParallel
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from megapack.schedule.p2p import PlannedP2PCommunicator
from megapack.schedule.runner import ScheduleRunner

Sample = tuple[Ids, Ids]
"""Token ids of the prompt and of the response."""

LAYOUT = Layout(pp=2, vpp=2)
MODEL = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2)
# Wider than MODEL: with 64 channels, a step is mostly launches and copies.
GROUPS_MODEL = ModelConfig(
    num_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    max_position_embeddings=65536,
)


class ExchangingCommunicator(PlannedP2PCommunicator):
    """Exchanges every shape with the other stage, as Megatron does, although the plan knows it."""

    def _communicate_shapes(self, *args: Any) -> tuple[list[int], list[int]]:
        super()._communicate_shapes(*args)
        return P2PCommunicator._communicate_shapes(self, *args)


class ExchangingRunner(ScheduleRunner):
    """Runs the same rows with Megatron's shape exchange."""

    communicator_class = ExchangingCommunicator


class ExchangingAdapter(ScheduleAdapter):
    """Runs steps with Megatron's shape exchange."""

    runner_class = ExchangingRunner


@dataclass(frozen=True)
class Way:
    """One way to run the samples."""

    name: str
    adapter: ScheduleAdapter
    plan: Plan
    batch: SampleBatch

    def step(self) -> float:
        """Seconds of one forward and backward, on the slowest rank."""
        for chunk in self.adapter.chunks:
            chunk.zero_grad_buffer()
        dist.barrier()
        started = time.perf_counter()
        self.adapter.step(self.plan, self.batch, objective=SFT())
        seconds = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)


def num_tokens(sample: Sample) -> int:
    """Tokens of prompt and response together."""
    return sum(map(len, sample))


def sample_batch(samples: Sequence[Sample], pad_to: Sequence[int] | None = None) -> SampleBatch:
    """The samples as a batch; `pad_to` appends tokens without a loss."""
    prompts, responses, masks = [], [], []
    for i, (prompt_ids, response_ids) in enumerate(samples):
        pad = 0 if pad_to is None else pad_to[i] - num_tokens(samples[i])
        prompts.append(torch.from_numpy(prompt_ids))
        response = torch.from_numpy(response_ids)
        responses.append(torch.cat([response, response.new_zeros(pad)]))
        masks.append(torch.tensor([0] * len(prompts[-1]) + [1] * len(response) + [0] * pad))
    return SampleBatch.from_prompt_response(prompts, responses, {"response_mask": masks})


def make_ways(samples: Sequence[Sample], chunks: list, budget: int, dense: int) -> list[Way]:
    """Every way of running the samples.

    Args:
        budget: tokens of a packed row.
        dense: samples of a padded dense batch.
    """
    adapter = ScheduleAdapter(chunks, layout=LAYOUT)
    exchanging = ExchangingAdapter(chunks, layout=LAYOUT)
    batch = sample_batch(samples)
    longest = [
        max(map(num_tokens, samples[i // dense * dense : i // dense * dense + dense]))
        for i in range(len(samples))
    ]
    padded = sample_batch(samples, longest)

    def plan(of: SampleBatch, policy: Policy, **budget: int) -> Plan:
        return build_dp_schedule(of.lengths, layout=LAYOUT, policy=policy, **budget)

    planned = Policy()
    uniform = Policy(row_shape="uniform")
    packed = plan(batch, planned, max_tokens_per_gpu=budget)
    return [
        Way("packed, planned shapes", adapter, packed, batch),
        Way("packed, Megatron's shape exchange", exchanging, packed, batch),
        Way(
            "packed, uniform rows",
            adapter,
            plan(batch, uniform, max_tokens_per_gpu=budget),
            batch,
        ),
        Way(
            f"padded dense, {dense} samples",
            exchanging,
            plan(padded, planned, micro_batch_size=dense),
            padded,
        ),
        Way(
            "one sample per micro-batch",
            exchanging,
            plan(batch, planned, micro_batch_size=1),
            batch,
        ),
    ]


def ratios(ways: Sequence[Way], rounds: int) -> list[tuple[Way, float]]:
    """Per way the median over rounds of its seconds divided by the first way's in the same round.

    Every round runs each way once, so that a machine that slows down slows all of them. The first
    round is a warm-up and is not counted.
    """
    seconds = [[way.step() for way in ways] for _ in range(rounds + 1)][1:]
    columns = zip(*[[s / row[0] for s in row] for row in seconds], strict=True)
    return [(way, statistics.median(c)) for way, c in zip(ways, columns, strict=True)]


def table(
    title: str,
    samples: Sequence[Sample],
    results: list[tuple[Way, float]],
    heading: Sequence[str] = ("way", "M", "real / row tokens", "step time, packed = 1"),
) -> str:
    """A Markdown table of ratios to the first way."""
    tokens = sum(map(num_tokens, samples))
    lines = [
        f"### {title}: {len(samples)} samples, {tokens} tokens",
        "",
        f"| {' | '.join(heading)} |",
        "|---|---|---|---|",
    ]
    for way, ratio in results:
        step = way.plan.steps[0]
        row_tokens = sum(mb.row_tokens for rank in step.ranks for mb in rank)
        lines.append(
            f"| {way.name} | {step.num_microbatches} | {tokens / row_tokens:.3f} | {ratio:.3f} |"
        )
    return "\n".join(lines)


def machine() -> str:
    """The machine and versions of the measurement."""
    return (
        f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {dist.get_world_size()} processes over gloo, "
        f"{torch.get_num_threads()} thread(s) each"
    )


def group_ways(options: argparse.Namespace, chunks: list, layout: Layout) -> list[Way]:
    """Rows that hold each prompt once per sample, and rows that hold it once per group."""
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int) -> Any:
        return torch.randint(ByteTokenizer.vocab_size, (tokens,), generator=generator).numpy()

    prompts = [draw(options.prompt) for _ in range(options.prompts)]
    samples = [
        (prompt, draw(options.response)) for prompt in prompts for _ in range(options.groups)
    ]
    batch = sample_batch(samples)
    budget = options.budget or options.groups * (options.prompt + options.response)
    prefixes = SharedPrefixes.from_samples([batch.tokens(i) for i in range(len(batch))])
    adapter = ScheduleAdapter(chunks, layout=layout)
    plans = [
        build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=budget, prefixes=shared)
        for shared in (None, prefixes)
    ]
    names = ("each sample has its own prompt", "shared prompts")
    return [Way(name, adapter, plan, batch) for name, plan in zip(names, plans, strict=True)]


def group_table(options: argparse.Namespace, results: list[tuple[Way, float]]) -> str:
    """A Markdown table of rows with and without shared prompts."""
    lines = [
        f"### {options.prompts} prompts of {options.prompt} tokens, {options.groups} responses of "
        f"{options.response} each, hidden size {GROUPS_MODEL.hidden_size}",
        "",
        "| way | M | row tokens | step time, unshared = 1 |",
        "|---|---|---|---|",
    ]
    for way, ratio in results:
        counts = way.plan.counts
        lines.append(
            f"| {way.name} | {counts.microbatch_span} | {counts.row_tokens} | {ratio:.3f} |"
        )
    return "\n".join(lines)


def compare_groups(options: argparse.Namespace) -> list[str]:
    """The table of `--groups`."""
    layout = Layout() if dist.get_world_size() == 1 else LAYOUT
    initialize_parallel(layout, seed=1)
    chunks = build_model(
        GROUPS_MODEL,
        layout,
        vocab_size=ByteTokenizer.vocab_size,
        seed=1,
        distributed_optimizer=False,
    )
    return [group_table(options, ratios(group_ways(options, chunks, layout), options.rounds))]


def width_ways(options: argparse.Namespace, chunks: list, layout: Layout) -> list[Way]:
    """Rows of one data-parallel rank each, and rows that several may share."""
    lengths = [options.long, *[options.short] * options.num_short]
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(ByteTokenizer.vocab_size, (n,), generator=generator) for n in lengths]
    batch = sample_batch([(t[:1].numpy(), t[1:].numpy()) for t in tokens])
    adapter = ScheduleAdapter(chunks, layout=layout)
    kinds: tuple[ContextParallel, ...] = ("fixed", "dynamic")
    return [
        Way(
            kind,
            adapter,
            build_dp_schedule(
                batch.lengths,
                layout=layout,
                max_tokens_per_gpu=options.budget or options.long,
                cost=width_cost(options, layout),
                policy=Policy(context_parallel=kind),
            ),
            batch,
        )
        for kind in kinds
    ]


def width_cost(options: argparse.Namespace, layout: Layout) -> CostModel:
    """The cost model that a run on CPUs without a measured one takes."""
    return cost_from_sizes(
        replace(GROUPS_MODEL, vocab_size=ByteTokenizer.vocab_size),
        layout,
        GpuSpeed.of("cpu", "fp32"),
        recompute="none",
        mean_length=options.long,
    )


def width_table(
    options: argparse.Namespace, layout: Layout, results: list[tuple[Way, float]]
) -> str:
    """A Markdown table of plans with and without rows that ranks share."""
    cost = width_cost(options, layout)
    simulated = [simulate_planned(way.plan, way.plan.steps[0], cost).makespan for way, _ in results]
    lines = [
        f"### {layout.label}: one sample of {options.long} tokens, {options.num_short} of "
        f"{options.short}, hidden size {GROUPS_MODEL.hidden_size}",
        "",
        "| context_parallel | M | shared rows | simulated, fixed = 1 | step time, fixed = 1 |",
        "|---|---|---|---|---|",
    ]
    for (way, ratio), seconds in zip(results, simulated, strict=True):
        counts = way.plan.counts
        lines.append(
            f"| {way.name} | {counts.microbatch_span} | {counts.num_wide_rows} | "
            f"{seconds / simulated[0]:.2f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def compare_widths(options: argparse.Namespace) -> list[str]:
    """The table of `--long`."""
    layout = Layout(dp=2, pp=dist.get_world_size() // 2)
    initialize_parallel(layout, seed=1)
    chunks = build_model(
        GROUPS_MODEL,
        layout,
        vocab_size=ByteTokenizer.vocab_size,
        seed=1,
        distributed_optimizer=False,
    )
    results = ratios(width_ways(options, chunks, layout), options.rounds)
    return [width_table(options, layout, results)]


def compare_executors(options: argparse.Namespace) -> list[str]:
    """The tables of `--executors`."""
    pp = dist.get_world_size()
    layouts = [Layout()] if pp == 1 else [Layout(pp=pp), Layout(pp=pp, vpp=2)]
    samples = [(r.prompt_ids, r.response_ids) for r in generate_rollouts(32, 4, seed=0)]
    batch = sample_batch(samples)
    tables = []
    for layout in layouts:
        initialize_parallel(layout, seed=1)
        for model in (MODEL, GROUPS_MODEL):
            chunks = build_model(
                replace(model, num_layers=max(model.num_layers, layout.pp * layout.vpp)),
                layout,
                vocab_size=ByteTokenizer.vocab_size,
                seed=1,
                distributed_optimizer=False,
            )
            plan = build_dp_schedule(
                batch.lengths, layout=layout, max_tokens_per_gpu=options.budget or 640
            )
            ways = [
                Way(name, ScheduleAdapter(chunks, layout=layout, executor=name), plan, batch)
                for name in get_args(Executor)
            ]
            title = f"{layout.label}, hidden size {model.hidden_size}, generated rollouts"
            heading = ("way", "M", "real / row tokens", "step time, Megatron's schedules = 1")
            results = ratios(ways, options.rounds)
            tables.append(table(title, samples, results, heading))
        parallel_state.destroy_model_parallel()
    return tables


def compare_packings(options: argparse.Namespace) -> list[str]:
    """The tables of all ways to run generated rollouts, and those of a file."""
    initialize_parallel(LAYOUT, seed=1)
    chunks = build_model(
        MODEL, LAYOUT, vocab_size=ByteTokenizer.vocab_size, seed=1, distributed_optimizer=False
    )
    generated = [(r.prompt_ids, r.response_ids) for r in generate_rollouts(32, 4, seed=0)]
    data = [("generated rollouts", generated, 1024, 8), ("generated rollouts", generated, 640, 8)]
    if options.rollouts is not None:
        settings = ReadSettings(max_length=options.max_length, overlong="skip")
        dataset = Dataset.from_files(options.rollouts, settings, Path(tempfile.gettempdir()))
        rows = range(min(len(dataset), options.num_rollouts))
        tokens = [dataset.tokens(row) for row in rows]
        real = [(one.prompt_ids, one.response_ids) for one in tokens]
        data.append((options.rollouts.stem, real, options.max_length, 4))
    tables = []
    for title, samples, budget, dense in data:
        ways = make_ways(samples, chunks, budget, dense)
        tables.append(table(f"{title}, rows of {budget}", samples, ratios(ways, options.rounds)))
    return tables


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=Path, help="JSON Lines to measure as well")
    parser.add_argument("--num-rollouts", type=int, default=32, help="lines of the file to use")
    parser.add_argument("--max-length", type=int, default=8192, help="skip longer samples")
    parser.add_argument("--groups", type=int, help="responses per prompt: compare shared prompts")
    parser.add_argument("--prompts", type=int, default=2, help="number of prompts")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=512, help="tokens of a response")
    parser.add_argument(
        "--budget", type=int, help="tokens of a row; default: an unshared group, or --long"
    )
    parser.add_argument("--long", type=int, help="tokens of the longest sample: compare widths")
    parser.add_argument("--short", type=int, default=128, help="tokens of the other samples")
    parser.add_argument("--num-short", type=int, default=16, help="number of other samples")
    parser.add_argument("--executors", action="store_true", help="compare the two executors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    options = parser.parse_args()
    launch.start("cpu")
    compare = compare_packings
    if options.groups is not None:
        compare = compare_groups
    elif options.long is not None:
        compare = compare_widths
    elif options.executors:
        compare = compare_executors
    tables = compare(options)
    if dist.get_rank() == 0:
        text = "\n\n".join([machine(), *tables])
        print(text)
        if options.markdown:
            options.markdown.write_text(text + "\n", encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main()
