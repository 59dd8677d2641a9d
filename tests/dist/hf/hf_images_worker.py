"""Loads folders of models with images on layouts, and exports them again: the model, and its
checkpoint after the tower has changed.

torchrun --nproc-per-node 2 -m tests.dist.hf.hf_images_worker MODELS OUT CASE ...
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megapack import Layout, launch
from megapack.job.checkpoint.state import RunState
from megapack.job.config.sections import ModelConfig, OptimConfig
from megapack.job.gpt import build_model, build_vision, initialize_parallel
from megapack.job.gpt.optimizer import build_optimizer
from megapack.job.hf import export_hf, load_hf_weights
from megapack.job.hf.blocks import own_blocks
from megapack.job.hf.checkpoint import CheckpointTensors
from megapack.job.hf.export import SHARD_BYTES, Exporter
from tests.dist.groups import end_model_parallel
from tests.dist.setup import error_of

TP_SP = {"tp": 2, "sequence_parallel": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model's folder, and the layout that loads it."""

    folder: str
    layout: Layout
    vision: str = "train"

    @property
    def is_hybrid(self) -> bool:
        """Whether it needs HybridModel."""
        return self.folder.startswith("qwen3_5")


CASES = {
    "single": Case(folder="qwen3_vl", layout=Layout()),
    "single_windows": Case(folder="qwen2_5_vl", layout=Layout()),
    "single_columns": Case(folder="moe_columns", layout=Layout()),
    "pp2": Case(folder="qwen3_vl", layout=Layout(pp=2)),
    "off": Case(folder="qwen3_vl", layout=Layout(**TP_SP), vision="off"),
    "windows": Case(folder="qwen2_5_vl", layout=Layout(**TP_SP)),
    "windows_renamed": Case(folder="renamed", layout=Layout(pp=2), vision="frozen"),
    "experts": Case(folder="moe_rows", layout=Layout(**TP_SP, ep=2, etp=1)),
    "expert_columns": Case(folder="moe_columns", layout=Layout(**TP_SP, ep=1, etp=2)),
    "expert_columns_dp2": Case(folder="moe_columns", layout=Layout(dp=2, ep=2)),
    "hybrid": Case(folder="qwen3_5", layout=Layout(pp=2)),
    "hybrid_experts": Case(folder="qwen3_5_moe", layout=Layout(dp=2, ep=2)),
}


def run(name: str, models: Path, out: Path, device: torch.device) -> None:
    """Load and export a case's folder; its exports are `out/NAME` and `out/NAME_saved`."""
    case = CASES[name]
    folder = models / case.folder
    initialize_parallel(case.layout, 1)
    model = ModelConfig.from_hf(str(folder), vision=case.vision)
    assert model.vocab_size is not None
    chunks = build_model(
        model,
        case.layout,
        vocab_size=model.vocab_size,
        seed=1,
        distributed_optimizer=True,
        draws_weights=False,
    )
    modules = list(chunks)
    if case.vision != "off":
        modules.append(build_vision(model, distributed_optimizer=True))
    for _, values in own_blocks(modules):
        values.fill_(7.0)
    load_hf_weights(modules, folder, device=device)
    found = {
        f"{one.key}{one.index}{one.start}": value.clone() for one, value in own_blocks(modules)
    }
    torch.save(found, out / f"{name}_rank{dist.get_rank()}.pt")
    export_hf(modules, out / name, like=folder, device=device)
    if case.vision == "train":
        tower = modules[-1]
        with torch.no_grad():
            for param in tower.parameters():
                param.add_(1)
        optimizer = build_optimizer(OptimConfig(distributed_optimizer=True), chunks, False, tower)
        state = out / f"{name}_state"
        if dist.get_rank() == 0:
            state.mkdir()
        dist.barrier()
        writer = RunState(modules, optimizer).writer(state, num_threads=1, device=device)
        writer.plan()
        writer.write()
        writer.finish()
        dist.barrier()
        exporter = Exporter(out / f"{name}_saved", folder, None, SHARD_BYTES, device)
        exporter.export(CheckpointTensors(state).sources())
    end_model_parallel()


def run_error(models: Path, device: torch.device) -> str:
    """The error of a tower that lacks tensors of its folder."""
    initialize_parallel(Layout(dp=2), 1)
    model = ModelConfig.from_hf(str(models / "qwen3_vl"), vision="frozen")
    tower = build_vision(model, distributed_optimizer=False)
    del tower.module.visual.deepstack_merger_list[1]
    assert model.vocab_size is not None
    chunks = build_model(
        model, Layout(dp=2), vocab_size=model.vocab_size, seed=1, distributed_optimizer=False
    )
    modules = [*chunks, tower]
    return error_of(lambda: load_hf_weights(modules, models / "qwen3_vl", device=device) and None)


def main(models: str, out: str, *names: str) -> None:
    """Run the cases; all have the same number of processes."""
    device = launch.start("cpu")
    for name in names:
        if name == "error":
            found = run_error(Path(models), device)
            Path(out, f"error_rank{dist.get_rank()}").write_text(found)
        else:
            run(name, Path(models), Path(out), device)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
