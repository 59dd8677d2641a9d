"""Runs the main job and writes the samples whose tokens this rank has read.

torchrun -m tests.dist.train.data_worker CONFIG OUT_DIR [overrides]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from megapack import launch
from megapack.config import load_config
from megapack.job.config.sections import TrainConfig
from megapack.job.data.dataset import Dataset
from megapack.job.data.index import SampleTokens
from megapack.job.train import Trainer
from megapack.job.train.passes import PlannedBatch
from megapack.ranks.interrupt import Interrupt
from megapack.ranks.links import Ranks
from tests.dist.setup import write_report


class RecordingTrainer(Trainer):
    """The main job; it records the samples that it reads, and those in its plans."""

    def run(self) -> Path:
        """Run the job and record its reads."""
        self.read: list[int] = []
        self.planned: list[int] = []
        tokens = self.data.tokens

        def recorded(row: int) -> SampleTokens:
            self.read.append(row)
            return tokens(row)

        object.__setattr__(self.data, "tokens", recorded)
        return super().run()

    def _prepare(self, rows: np.ndarray) -> PlannedBatch:
        batch = super()._prepare(rows)
        dp_rank = self.adapter.dp_rank
        own = [
            row
            for plan in (batch.plan, batch.forward_plan)
            for step in plan.steps
            for row in step.ranks[dp_rank]
        ]
        samples = sorted({i for row in own for i in row.samples})
        for sample in samples:
            assert len(batch.samples.tokens(sample)) == batch.samples.length(sample)
        self.planned += rows[samples].tolist()
        return batch


def main(config_path: str, out_dir: str, *overrides: str) -> None:
    """Train, and write the recorded samples."""
    config = load_config(config_path, overrides, TrainConfig)
    device = launch.start("cpu")
    trainer = RecordingTrainer(config, device, Interrupt(saves=False), Ranks.start())
    assert isinstance(trainer.data, Dataset)
    trainer.run()
    results = {"read": trainer.read, "planned": trainer.planned, "num_samples": len(trainer.data)}
    write_report(out_dir, results)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
