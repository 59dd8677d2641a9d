"""Trains a toy mixture of experts and writes which experts each sample chose.

    torchrun --nproc-per-node 2 -m tools.expert_loading.record OUT BATCHES CONFIG [OVERRIDE ...]

Records the last BATCHES batches with the weights after the last step, in forward passes with
`record_routing`. OUT gets per sample its tokens, prompt group and counts [layers, experts].
"""

from __future__ import annotations

import sys
from collections import deque

import numpy as np
import torch.distributed as dist

from megapack import launch
from megapack.config.load import load_config
from megapack.job.config.sections import TrainConfig
from megapack.job.data.dataset import SampleNumbers
from megapack.job.train.job import Trainer
from megapack.ranks.interrupt import Interrupt
from megapack.ranks.links import Ranks
from tools.expert_loading.loads import expert_counts


class Recorder(Trainer):
    """The main job, which remembers its last batches."""

    recent: deque[SampleNumbers]

    def _train_on(self, numbers: SampleNumbers) -> None:
        super()._train_on(numbers)
        self.recent.append(numbers)


def main(out: str, num_batches: str, path: str, *overrides: str) -> None:
    """Train, record, and let rank 0 write the file."""
    config = load_config(path, list(overrides), TrainConfig)
    interrupt = Interrupt(saves=False)
    device = launch.start(config.device)
    ranks = Ranks.start(config.watchdog, ends_process=True, interrupt=interrupt)
    trainer = Recorder(config, device, interrupt, ranks)
    trainer.recent = deque(maxlen=int(num_batches))
    trainer.run()
    num_experts = config.model.num_experts
    assert num_experts is not None
    tokens = []
    groups = []
    counts = []
    for numbers in trainer.recent:
        batch = trainer._prepare(numbers)
        for step in range(len(batch.plan.steps)):
            found = trainer.adapter.forward(
                batch.plan, batch.samples, step=step, record_routing=True
            )["routing"]
            for number, routes in zip(numbers.tolist(), found, strict=True):
                if routes is None:
                    continue
                tokens.append(len(routes))
                # Sample i is line i of the data, and groups are consecutive lines.
                groups.append(number // config.data.generated_group_size)
                counts.append(expert_counts(routes.numpy(), num_experts))
    if dist.get_rank() == 0:
        np.savez(out, tokens=np.array(tokens), groups=np.array(groups), counts=np.stack(counts))
    dist.barrier()
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
