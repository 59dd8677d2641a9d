"""Steps of models as a GPTModel and as a HybridModel, with the same first weights.

torchrun --nproc-per-node 1 -m tests.dist.model.classes_worker OUT_DIR FOLDERS NAME ...

A name is one of `problem.MODELS`, or a family whose folder is in FOLDERS. Behind `letters/` its
HybridModel is one of letters, each attention or an MLP alone, as frameworks build it.
"""

from __future__ import annotations

import dataclasses
import re
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
from megapack.plan import Plan
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.setup import report_cases

LOSSES = ("moe_", "indexer_")
"""How names of metrics begin that depend on where layers are."""


def model_of(name: str, folders: Path) -> ModelConfig:
    """The model without a choice of its class."""
    if name in problem.MODELS:
        return problem.shallow(problem.MODELS[name][0])
    return ModelConfig.from_hf(str(folders / name), indexer_loss_coef=0.0)


def built(model: ModelConfig) -> list[Any]:
    """The chunk of one process."""
    initialize_parallel(Layout(), problem.SEED)
    return build_model(
        model,
        Layout(),
        vocab_size=problem.VOCAB_SIZE,
        seed=problem.SEED,
        distributed_optimizer=False,
    )


def plan() -> Plan:
    """Rows of several samples."""
    lengths = problem.make_batch(6).lengths
    return build_dp_schedule(lengths, layout=Layout(), max_tokens_per_gpu=64)


def step(model: ModelConfig) -> tuple[str, float, dict[str, torch.Tensor], dict[str, Any]]:
    """Class of the chunk, loss, gradients by name, and tensors as a checkpoint has them."""
    (chunk,) = chunks = built(model)
    adapter = ScheduleAdapter(chunks, layout=Layout())
    result = adapter.step(plan(), problem.make_batch(6), objective=problem.OBJECTIVE)
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


def half(name: str, letters: str) -> str:
    """The name that a block's parameter has in a model of letters, two for each block."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if match is None:
        return name
    layer = 2 * int(match[1]) + match[2].startswith(("mlp.", "pre_mlp_"))
    assert layer < len(letters)
    return f"decoder.layers.{layer}.{match[2]}"


def compare_letters(model: ModelConfig) -> dict[str, Any]:
    """What a HybridModel of letters has otherwise than a GPTModel with the same weights."""
    mixer = "D" if model.indexer_top_k else "+" if model.uses_mla else "*"
    letters = "".join(mixer + letter for letter in model.mlp_letters)
    changes = {"num_layers": len(letters), "hybrid_layer_pattern": letters}
    lettered = dataclasses.replace(model, **changes, moe_first_dense_layers=0)
    weights: dict[str, torch.Tensor] = {}
    found: list[Any] = []
    for one in (dataclasses.replace(model, megatron_class="gpt"), lettered):
        (chunk,) = chunks = built(one)
        for name, param in global_parameters(chunk):
            if one is lettered:
                param.data.copy_(weights.pop(name))
            else:
                weights[half(name, letters)] = param.data.clone()
        if one is lettered:
            # Megatron's default, with which its pattern alone says where experts are.
            unwrapped(chunk).config.moe_layer_freq = 1
        adapter = ScheduleAdapter(chunks, layout=Layout())
        result = adapter.step(plan(), problem.make_batch(6), objective=problem.OBJECTIVE)
        gradients = {
            name if one is lettered else half(name, letters): param.main_grad.clone()
            for name, param in global_parameters(chunk)
        }
        routing = None
        if model.num_experts:
            recorded = adapter.forward(plan(), problem.make_batch(6), record_routing=True)
            routing = [choices.tolist() for choices in recorded["routing"]]
        sums = {name: value for name, value in result.metrics.items() if name.startswith(LOSSES)}
        found.append((result.loss, sums, routing, gradients))
        end_model_parallel()
    (*expected, gradients), (*own, lettered_gradients) = found
    return {
        "left": sorted(weights),
        "expected": expected,
        "found": own,
        "num_gradients": sum(bool(gradient.any()) for gradient in gradients.values()),
        "gradients": differing(gradients, lettered_gradients),
    }


def main(out_dir: str, folders: str, *names: str) -> None:
    """Compare the models and write `OUT_DIR/rank0.json`."""

    def run(name: str) -> dict[str, Any]:
        kind, _, last = name.rpartition("/")
        model = model_of(last, Path(folders))
        return compare_letters(model) if kind else compare(model)

    report_cases(out_dir, run, names)


if __name__ == "__main__":
    main(*sys.argv[1:])
