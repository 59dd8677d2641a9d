"""Trains two copies of a model in turn: with overlap of DDP's communication, and without.

python -m tools.nccl.on_ranks.overlap TASK OUT
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from megapack import Layout, Plan, build_dp_schedule, launch
from megapack.job.config.sections import OptimConfig, TrainConfig
from megapack.job.gpt import initialize_parallel
from megapack.job.gpt.optimizer import build_optimizer
from megapack.job.gpt.settings import reduction_settings
from megapack.loss import SFT
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from tests.rehearsal import recorder
from tools.benching.gpu_ways import make_batch, zero_gradients
from tools.nccl.layouts import layout_name
from tools.nccl.measured import read_config, read_task
from tools.nccl.on_ranks.measured import Together, with_random_weights
from tools.nccl.on_ranks.progress import note, write


class Trainer:
    """A model with its optimizer, which leaves the weights as they are: all steps are alike."""

    def __init__(
        self, config: TrainConfig, plan: Plan, batch: SampleBatch, *, overlaps: bool
    ) -> None:
        optim = OptimConfig(
            lr=0.0,
            weight_decay=0.0,
            distributed_optimizer=True,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=overlaps,
        )
        self._plan, self._batch = plan, batch
        self._adapter = ScheduleAdapter(
            with_random_weights(config.seed)(
                config.model,
                plan.layout,
                vocab_size=config.model.vocab_size,
                seed=config.seed,
                distributed_optimizer=True,
                reduction=reduction_settings(optim, plan.layout),
            ),
            layout=plan.layout,
            logprob_chunk_tokens=config.objective.logprob_chunk_tokens,
        )
        is_bf16 = config.model.dtype == "bf16"
        self._optimizer = build_optimizer(optim, self._adapter.chunks, bf16=is_bf16)
        self.norm = 0.0

    def step(self) -> None:
        """Forward, backward and update."""
        zero_gradients(self._adapter.chunks)
        self._optimizer.zero_grad()
        self._adapter.step(self._plan, self._batch, objective=SFT())
        self.norm = float(self._optimizer.step()[1])


def compare(
    config: TrainConfig, layout: Layout, task: dict[str, Any], together: Together
) -> dict[str, Any]:
    """Median seconds of both ways on a layout."""
    name = layout_name(layout)
    initialize_parallel(layout, config.seed)
    batch = make_batch([tuple(sample) for sample in task["samples"]], config.model.vocab_size)
    plan = build_dp_schedule(
        batch.lengths, layout=layout, max_tokens_per_gpu=config.plan.max_tokens_per_gpu
    )
    ways = {kind: Trainer(config, plan, batch, overlaps=kind == "on") for kind in ("on", "off")}
    seconds: dict[str, list[float]] = {kind: [] for kind in ways}
    # The second step is the first that gathers weights.
    for _ in range(2):
        for way in ways.values():
            note(name)
            way.step()
    norms = [way.norm for way in ways.values()]
    for number in range(task["rounds"]):
        if number and together.is_over():
            break
        for kind, way in ways.items():
            note(name)
            seconds[kind].append(together.seconds(way.step))
    medians = {f"{kind}_s": float(np.median(own)) for kind, own in seconds.items()}
    return {
        **medians,
        "on_of_off": medians["on_s"] / medians["off_s"],
        "norm_difference": abs(norms[0] - norms[1]) / norms[1],
        "rounds": len(seconds["off"]),
    }


def main(path: str, out: str) -> None:
    """Compare on each layout; rank 0 writes after each."""
    task = read_task(path)
    launch.start("cuda")
    together = Together(task["end"])
    config = read_config(task["settings"])
    layouts = [Layout.from_payload(payload) for payload in task["layouts"]]
    found: dict[str, Any] = {}
    for layout in together.in_turn(layouts):
        found[layout_name(layout)] = compare(config, layout, task, together)
        write(out, found)
    launch.stop()


if __name__ == "__main__":
    with recorder.unchecked():
        main(*sys.argv[1:])
