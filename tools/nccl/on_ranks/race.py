"""Runs the plans of a task in turn; rank 0 writes seconds, bytes and gradient norms after each.

python -m tools.nccl.on_ranks.race TASK OUT
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

from megapack import Layout, Plan, launch
from megapack.job.config.sections import TrainConfig
from megapack.job.gpt import initialize_parallel
from megapack.loss import SFT
from megapack.model.parameters import global_parameters
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from tests.rehearsal import recorder
from tools.benching.gpu_ways import make_batch, zero_gradients
from tools.nccl.measured import read_config, read_task
from tools.nccl.on_ranks.measured import Together, with_random_weights
from tools.nccl.on_ranks.progress import note, write


class Copy:
    """The model, and its bytes. Split backwards need layers of their own, which put off weight
    gradients, and Megatron's schedules run no such layers: so there are two copies."""

    def __init__(self, config: TrainConfig, layout: Layout, *, splits: bool) -> None:
        before = torch.cuda.memory_allocated()
        chunks = with_random_weights(config.seed)(
            config.model,
            layout,
            vocab_size=config.model.vocab_size,
            seed=config.seed,
            distributed_optimizer=False,
            splits_backward=splits,
        )
        self.bytes = torch.cuda.memory_allocated() - before
        chunk_tokens = config.objective.logprob_chunk_tokens
        self.adapter = ScheduleAdapter(chunks, layout=layout, logprob_chunk_tokens=chunk_tokens)

    def gradient_norm(self, together: Together) -> float:
        """Of the whole model; a weight that two stages have counts twice."""
        own = sum(
            float(param.main_grad.float().norm()) ** 2
            for chunk in self.adapter.chunks
            for _, param in global_parameters(chunk)
        )
        return math.sqrt(together.total(own) / self.adapter.layout.dp)


def run_race(
    config: TrainConfig,
    plans: dict[str, Plan],
    batch: SampleBatch,
    rounds: int,
    together: Together,
) -> Iterator[dict[str, dict[str, Any]]]:
    """Run each plan once to warm up, then in rounds until the time is over; figures after each.

    Args:
        plans: by the name that is noted.
    """
    layout = next(iter(plans.values())).layout
    initialize_parallel(layout, config.seed)
    splits = {name: plan.policy.backward == "split" for name, plan in plans.items()}
    copies = {kind: Copy(config, layout, splits=kind) for kind in sorted(set(splits.values()))}
    found: dict[str, Any] = {}

    def step(name: str) -> None:
        own = copies[splits[name]].adapter
        zero_gradients(own.chunks)
        own.step(plans[name], batch, objective=SFT())

    for name in plans:
        note(name)
        own = copies[splits[name]]
        torch.cuda.reset_peak_memory_stats()
        step(name)
        others = sum(copy.bytes for copy in copies.values() if copy is not own)
        peak = together.largest(torch.cuda.max_memory_allocated() - others)
        norm = own.gradient_norm(together)
        found[name] = {"seconds": [], "bytes": peak, "gradient_norm": norm}
    for number in range(rounds):
        for name in plans:
            note(name)
            if number and together.is_over():
                return
            found[name]["seconds"].append(together.seconds(lambda name=name: step(name)))
            yield found


def main(path: str, out: str) -> None:
    """Run the races of all layouts; each has an equal share of the time that is left."""
    task = read_task(path)
    launch.start("cuda")
    together = Together(task["end"])
    config = read_config(task["settings"])
    assert config.model.vocab_size is not None
    batch = make_batch([tuple(sample) for sample in task["samples"]], config.model.vocab_size)
    found: dict[str, Any] = {}
    for layout, texts in together.in_turn(task["plans"].items()):
        plans = {f"{layout} {way}": Plan.from_json(text) for way, text in texts.items()}
        for figures in run_race(config, plans, batch, task["rounds"], together):
            found |= figures
            write(out, found)
    launch.stop()


if __name__ == "__main__":
    with recorder.unchecked():
        main(*sys.argv[1:])
