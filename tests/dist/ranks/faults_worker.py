"""Each rank makes calls that must be refused, and writes their errors.

torchrun --nproc-per-node 2 -m tests.dist.ranks.faults_worker OUT_DIR
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megapack import Layout, Policy, build_dp_schedule, launch
from megapack.config import parse_config
from megapack.job.config.sections import TrainConfig
from megapack.job.train import Trainer
from megapack.loss import SFT
from megapack.ranks.agree import agree
from megapack.ranks.interrupt import Interrupt
from megapack.samples import SampleBatch, TensorField
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.setup import build_chunks, error_of, write_report

LAYOUT = Layout(pp=2, vpp=2)


class Faults:
    """One fault per method; if ranks differ, rank 1 makes the other call."""

    def __init__(self, chunks: list[Any]) -> None:
        self.chunks = chunks
        self.rank = dist.get_rank()
        self.batch = problem.make_batch()
        self.adapter = ScheduleAdapter(chunks, layout=LAYOUT)
        self.plan = build_dp_schedule(self.batch.lengths, layout=LAYOUT, max_tokens_per_gpu=64)

    def another_plan(self) -> None:
        budget = 64 if self.rank == 0 else 80
        plan = build_dp_schedule(self.batch.lengths, layout=LAYOUT, max_tokens_per_gpu=budget)
        self.adapter.step(plan, self.batch, objective=SFT())

    def missing_field(self) -> None:
        batch = SampleBatch([self.batch.tokens(i) for i in range(len(self.batch))])
        self.adapter.step(
            self.plan, self.batch if self.rank == 0 else batch, objective=problem.OBJECTIVE
        )

    def other_lengths(self) -> None:
        batch = self.batch if self.rank == 0 else SampleBatch([[1, 2]] * len(self.batch))
        self.adapter.step(self.plan, batch, objective=SFT())

    def other_layout(self) -> None:
        plan = build_dp_schedule(
            self.batch.lengths, layout=Layout(dp=2), max_tokens_per_gpu=64, policy=Policy()
        )
        self.adapter.step(plan, self.batch, objective=SFT())

    def routing_of_a_dense_model(self) -> None:
        self.adapter.forward(self.plan, self.batch, record_routing=True)

    def wrong_groups(self) -> None:
        ScheduleAdapter(self.chunks, layout=Layout(dp=2))

    def another_head(self) -> None:
        """Only the last stage can see the difference."""
        adapter = ScheduleAdapter(self.chunks, layout=LAYOUT, head="value")
        adapter.step(self.plan, self.batch, objective=SFT())

    def other_tensors(self) -> None:
        tokens = [self.batch.tokens(i) for i in range(len(self.batch))]
        shapes = [torch.zeros(1 + self.rank, 2)] * len(tokens)
        batch = SampleBatch(tokens, tensors={"pixels": TensorField(shapes)})
        self.adapter.step(self.plan, batch, objective=SFT())

    def another_cost_model(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cost.yaml"
            path.write_text(f"cost: {{per_token: {1 + self.rank}}}", encoding="utf-8")
            text = f"{{name: x, plan: {{max_tokens_per_gpu: 64, cost_model: '{path}'}}}}"
            config = parse_config(text, [], TrainConfig)
            Trainer(config, torch.device("cpu"), Interrupt(saves=False), self.adapter.ranks)

    def a_full_disk(self) -> None:
        """Only one rank fails; the others have nothing to write."""

        def write() -> None:
            if self.rank == 1:
                raise OSError(28, "No space left on device")

        agree(write, device=torch.device("cpu"))

    def nothing(self) -> None:
        self.adapter.step(self.plan, self.batch, objective=SFT())


FAULTS = [name for name in vars(Faults) if not name.startswith("_") and name != "nothing"]


def main(out_dir: str) -> None:
    """Try every fault, and then a correct step."""
    launch.start("cpu")
    faults = Faults(build_chunks(LAYOUT))
    errors = {name: error_of(getattr(faults, name)) for name in [*FAULTS, "nothing"]}
    write_report(out_dir, errors)
    launch.stop()


if __name__ == "__main__":
    main(sys.argv[1])
