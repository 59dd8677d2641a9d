"""A step on rows with shared prefixes against the step on rows without.

torchrun --nproc-per-node 2 -m tests.dist.rows.shared_rows_worker OUT_DIR
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import Layout, SharedPrefixes, build_dp_schedule, launch
from megapack.errors import ConfigError
from megapack.job.config.sections import ModelConfig
from megapack.loss import SFT
from megapack.plan import Plan
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.setup import build_chunks

DENSE = dataclasses.replace(problem.MODEL, num_layers=2)
LATENT = dataclasses.replace(problem.MLA_MODEL, num_layers=2)
CASES = {
    "cp2": (Layout(cp=2), DENSE),
    "latent_cp2": (Layout(cp=2), LATENT),
    "latent_cp2_recompute": (Layout(cp=2), dataclasses.replace(LATENT, recompute="full")),
    "latent_tp2_sp": (Layout(tp=2, sequence_parallel=True), LATENT),
    "latent_pp2": (Layout(pp=2), LATENT),
}


def make_samples() -> list[list[int]]:
    """Two trees with prefixes inside prefixes, and two samples alone."""
    rng = random.Random(4)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(problem.VOCAB_SIZE) for _ in range(count)]

    samples = [tokens(9), tokens(14)]
    for _ in range(2):
        prompt = tokens(21)
        turn = [0, *tokens(13)]
        samples += [[*prompt, 1 + k, *tokens(3 + k)] for k in range(2)]
        samples += [[*prompt, *turn, 3 + k, *tokens(2 + 3 * k)] for k in range(3)]
    return samples


def gradient(adapter: ScheduleAdapter, plan: Plan, batch: SampleBatch) -> tuple[float, Tensor]:
    """Loss and this rank's gradients of a step."""
    for chunk in adapter.chunks:
        chunk.zero_grad_buffer()
    result = adapter.step(plan, batch, objective=SFT())
    grads = [p.main_grad.double().flatten() for c in adapter.chunks for p in c.parameters()]
    return result.loss, torch.cat(grads)


def compared(layout: Layout, settings: ModelConfig) -> dict[str, object]:
    """Differences between rows that share nothing and rows that share prefixes."""
    adapter = ScheduleAdapter(build_chunks(layout, model=settings), layout=layout)
    samples = make_samples()
    batch = SampleBatch(samples)
    prefixes = SharedPrefixes.from_samples(samples)
    plain = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=160)
    shared = build_dp_schedule(
        batch.lengths, layout=layout, max_tokens_per_gpu=160, prefixes=prefixes
    )
    loss, wanted = gradient(adapter, plain, batch)
    shared_loss, found = gradient(adapter, shared, batch)
    adapter.config.hidden_dropout = 0.1
    try:
        adapter.step(shared, batch, objective=SFT())
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    return {
        "saved": sum(row.shared_tokens for row in shared.steps[0].ranks[0]),
        "losses": [loss, shared_loss],
        "norm": float(wanted.norm()),
        "error": float((found - wanted).norm() / wanted.norm()),
        "refusal": refusal,
    }


def main(out_dir: str) -> None:
    """Run all cases; each rank writes what it found."""
    launch.start("cpu")
    found = {}
    for name, (layout, settings) in CASES.items():
        found[name] = compared(layout, settings)
        end_model_parallel()
    (Path(out_dir) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
