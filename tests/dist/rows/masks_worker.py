"""A step of SFT on a file whose rows have loss masks, against one unpadded sample at a time.

torchrun --nproc-per-node 2 -m tests.dist.rows.masks_worker FILE OUT_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megapack import Layout, launch
from megapack.cost import CostModel
from megapack.job.config.sections import PlanConfig
from megapack.job.data.dataset import Dataset
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.train.passes import BatchPlanner
from megapack.loss import SFT
from megapack.model.parameters import global_parameters
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.exactness import reference
from tests.dist.setup import build_chunks

LAYOUT = Layout(dp=2)


def expected(rows: list[dict[str, Any]]) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradient from the rows as they are in the file, one sample at a time."""
    model = reference.build(problem.MODEL)
    total = torch.zeros(())
    num_tokens = 0
    for row in rows:
        tokens = torch.tensor(row["prompt_ids"] + row["response_ids"])
        mask = row.get("response_mask", [1] * len(row["response_ids"]))
        counts = torch.tensor([0] * len(row["prompt_ids"]) + mask)[1:]
        logp, _ = reference.logprobs_and_entropy(model, tokens, 1.0)
        total = total - (logp * counts).sum()
        num_tokens += int(counts.sum())
    loss = total / num_tokens
    loss.backward()
    return float(loss.detach()), reference.gradients(model)


def main(path: str, out_dir: str) -> None:
    """Run the step, and write how far this rank's gradients are from the expected ones."""
    launch.start("cpu")
    chunks = build_chunks(LAYOUT)
    adapter = ScheduleAdapter(chunks, layout=LAYOUT)
    settings = ReadSettings(vocab_size=problem.VOCAB_SIZE)
    data = Dataset.from_files(path, settings, Path(out_dir))
    planner = BatchPlanner(
        PlanConfig(max_tokens_per_gpu=48), LAYOUT, CostModel(), data, adapter.dp_rank
    )
    batch = planner.plan(np.arange(len(data)), {})
    result = adapter.step(batch.plan, batch.samples, objective=SFT())
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    loss, grads = expected(rows)
    error = 0.0
    norm = 0.0
    for chunk in chunks:
        for name, param in global_parameters(chunk):
            error += float((param.main_grad.double() - grads[name]).square().sum())
            norm += float(grads[name].square().sum())
    report = {
        "loss": result.loss,
        "expected_loss": loss,
        "gradient_error": (error / norm) ** 0.5,
        "gradient_norm": norm**0.5,
        "num_rows": len(list(batch.plan.steps[0].microbatches)),
    }
    text = json.dumps(report)
    (Path(out_dir) / f"rank{dist.get_rank()}.json").write_text(text, encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
