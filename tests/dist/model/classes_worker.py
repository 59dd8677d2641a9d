"""Steps of models as a GPTModel and as a HybridModel, with the same first weights.

torchrun --nproc-per-node 1 -m tests.dist.model.classes_worker OUT_DIR FOLDERS NAME ...

A name is one of `problem.MODELS`, or a family whose folder is in FOLDERS.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

from megapack import Layout, build_dp_schedule
from megapack.job.config.model import ModelConfig
from megapack.job.gpt import build_model, initialize_parallel
from megapack.model.head import unwrapped
from megapack.model.parameters import global_parameters
from megapack.model.sharded import saved_blocks
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.setup import report_cases


def model_of(name: str, folders: Path) -> ModelConfig:
    """The model without a choice of its class."""
    if name in problem.MODELS:
        return problem.shallow(problem.MODELS[name][0])
    return ModelConfig.from_hf(str(folders / name), indexer_loss_coef=0.0)


def step(model: ModelConfig) -> tuple[str, float, dict[str, torch.Tensor], dict[str, Any]]:
    """Class of the chunk, loss, gradients by name, and tensors as a checkpoint has them."""
    layout = Layout()
    initialize_parallel(layout, problem.SEED)
    chunks = build_model(
        model,
        layout,
        vocab_size=problem.VOCAB_SIZE,
        seed=problem.SEED,
        distributed_optimizer=False,
    )
    batch = problem.make_batch(6)
    plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=64)
    result = ScheduleAdapter(chunks, layout=layout).step(plan, batch, objective=problem.OBJECTIVE)
    (chunk,) = chunks
    gradients = {
        name: param.main_grad.clone()
        for name, param in global_parameters(chunk)
        if param.requires_grad
    }
    saved = {
        str((part.key, part.global_offset, part.local_shape)): part.data.detach().clone()
        for part in saved_blocks(chunk)
    }
    return type(unwrapped(chunk)).__name__, result.loss, gradients, saved


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one has, or whose tensors differ in a bit."""
    names = sorted(first.keys() | second.keys())
    return [n for n in names if not first.keys() & second.keys() & {n}] or [
        n for n in names if not torch.equal(first[n], second[n])
    ]


def compare(model: ModelConfig) -> dict[str, Any]:
    """What the two classes have otherwise."""
    found = []
    for name in ("gpt", "hybrid"):
        found.append(step(dataclasses.replace(model, megatron_class=name)))
        end_model_parallel()
    (gpt, loss, gradients, saved), (hybrid, hybrid_loss, hybrid_gradients, hybrid_saved) = found
    return {
        "classes": [gpt, hybrid],
        "losses": [loss, hybrid_loss],
        "num_gradients": sum(bool(gradient.any()) for gradient in gradients.values()),
        "gradients": differing(gradients, hybrid_gradients),
        "saved": differing(saved, hybrid_saved),
    }


def main(out_dir: str, folders: str, *names: str) -> None:
    """Compare the models and write `OUT_DIR/rank0.json`."""
    report_cases(out_dir, lambda name: compare(model_of(name, Path(folders))), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
