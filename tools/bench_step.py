"""Times a training step on the same samples: one per micro-batch, padded dense, and packed.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        tools/bench_step.py [--rollouts FILE.jsonl] [--measured]

All ways run one after another, in one process group and on one model. The table gives the median
over rounds of each way's time divided by that of packed rows with planned shapes in the same round.
A padded dense batch is a row whose samples are all padded to the longest sample of the micro-batch;
attention then runs as one [B, heads, S, d] batch. `--measured` writes
docs/measured/step_packings.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megapack import (
    Layout,
    Plan,
    Policy,
    build_dp_schedule,
    launch,
)
from megapack.job.config.sections import ModelConfig
from megapack.job.data.dataset import Dataset
from megapack.job.data.generated import generate_rollouts
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.data.tokenizer import ByteTokenizer, Ids
from megapack.job.gpt import build_model, initialize_parallel
from megapack.loss import SFT
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from megapack.schedule.p2p import PlannedP2PCommunicator
from megapack.schedule.runner import ScheduleRunner
from tools.pages import measured
from tools.pages.marks import table

Sample = tuple[Ids, Ids]
"""Token ids of the prompt and of the response."""

LAYOUT = Layout(pp=2, vpp=2)
TITLE = "A training step: packed rows, padded batches, one sample at a time"
WHAT = (
    "A GPT of 4 layers, width 64, on pp2 x vpp2, SFT, forward and backward. Every round runs each "
    "way once; the ratio to packed rows is taken within a round, and the median over the rounds is "
    "shown. Smaller is better."
)
MODEL = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2)


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


def section(title: str, samples: Sequence[Sample], results: list[tuple[Way, float]]) -> str:
    """A Markdown table of ratios to the first way, under a title."""
    tokens = sum(map(num_tokens, samples))
    rows = []
    for way, ratio in results:
        step = way.plan.steps[0]
        row_tokens = sum(mb.row_tokens for rank in step.ranks for mb in rank)
        filled = tokens / row_tokens
        rows.append((way.name, str(step.num_microbatches), f"{filled:.3f}", f"{ratio:.2f}"))
    head = ["way", "M", "real / row tokens", "step time, packed = 1"]
    return f"### {title}: {len(samples)} samples, {tokens} tokens\n\n{table(head, rows)}"


def machine() -> str:
    """The versions and the machine of the measurement."""
    return (
        f"{measured.versions('torch', 'megatron-core')}, {os.cpu_count()} cores "
        f"{platform.machine()}, {dist.get_world_size()} processes over gloo, "
        f"{torch.get_num_threads()} thread(s) each"
    )


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
        results = ratios(ways, options.rounds)
        tables.append(section(f"{title}, rows of {budget}", samples, results))
    return tables


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=Path, help="JSON Lines to measure as well")
    parser.add_argument("--num-rollouts", type=int, default=32, help="lines of the file to use")
    parser.add_argument("--max-length", type=int, default=8192, help="skip longer samples")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measured", action="store_true", help="write docs/measured as well")
    options = parser.parse_args()
    launch.start("cpu")
    tables = compare_packings(options)
    if dist.get_rank() == 0:
        print("\n\n".join([machine(), *tables]))
        if options.measured:
            measured.write("step_packings", TITLE, WHAT, ["\n\n".join(tables)], machine())
    launch.stop()


if __name__ == "__main__":
    main()
