"""Changes one bit of a weight on rank 1, on several layouts; each rank writes its errors.

torchrun --nproc-per-node 2 -m tests.dist.model.replicas_worker OUT_DIR CASE...

Without a case it does so in the main job, before it trains.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megapack import Layout, launch
from megapack.config import load_config
from megapack.job.config.sections import TrainConfig
from megapack.job.train import job
from megapack.model import check_replicas
from megapack.model.parameters import global_parameters
from megapack.ranks.interrupt import Interrupt
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.setup import build_chunks, error_of, write_report
from tests.dist.spawn import ROOT

CONFIG = ROOT / "configs" / "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"


@dataclass(frozen=True)
class Case:
    """A weight that both ranks of a layout hold."""

    layout: Layout
    weight: str
    variant: str = "plain"


CASES = {
    "dp": Case(Layout(dp=2), "decoder.layers.3.mlp.linear_fc1.weight"),
    "tp": Case(Layout(tp=2, sequence_parallel=True), "decoder.layers.2.input_layernorm.weight"),
    "tied": Case(Layout(pp=2), "embedding.word_embeddings.weight"),
    # Whole experts on each tensor-parallel rank, whose gradients are added over these ranks.
    "experts": Case(
        Layout(tp=2, etp=1, sequence_parallel=True),
        "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight",
        "moe",
    ),
    "latent": Case(
        Layout(tp=2, sequence_parallel=True),
        "decoder.layers.0.self_attention.linear_kv_down_proj.weight",
        "mla",
    ),
}


def main(out_dir: str, *names: str) -> None:
    """Write `OUT_DIR/rank<r>.json`: by case the errors before and after the change."""
    device = launch.start("cpu")
    found = {}
    for name in names:
        case = CASES[name]
        chunks = build_chunks(case.layout, model=problem.MODELS[case.variant][0])
        before = error_of(lambda chunks=chunks: check_replicas(chunks, device=device))
        if dist.get_rank() == 1:
            flip_last_bit(chunks, case.weight)
        after = error_of(lambda chunks=chunks: check_replicas(chunks, device=device))
        found[name] = [before, after]
        end_model_parallel()
    write_report(out_dir, found)
    launch.stop()


def train(out_dir: str) -> None:
    """Write `OUT_DIR/rank<r>.json`: the error of a main job whose runs are in `OUT_DIR/runs`."""
    settings = [f"runs_dir={out_dir}/runs", "layout.pp=1", "layout.vpp=1"]
    config = load_config(CONFIG, settings, TrainConfig)
    run = job.Trainer.run

    def changed(trainer: job.Trainer) -> Path:
        if dist.get_rank() == 1:
            flip_last_bit(trainer.chunks, "decoder.final_layernorm.weight")
        return run(trainer)

    with mock.patch.object(job.Trainer, "run", changed), Interrupt(saves=False) as interrupt:
        error = error_of(lambda: job.train(config, interrupt))
    Path(out_dir, f"rank{os.environ['RANK']}.json").write_text(json.dumps(error), encoding="utf-8")


def flip_last_bit(chunks: list[Any], weight: str) -> None:
    """Change the last value of a weight by its lowest bit."""
    (param,) = (p for chunk in chunks for name, p in global_parameters(chunk) if name == weight)
    param.data.view(torch.int32).view(-1)[-1] ^= 1


if __name__ == "__main__":
    (main if sys.argv[2:] else train)(*sys.argv[1:])
