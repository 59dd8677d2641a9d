"""Loads Hugging Face folders on layouts, and exports them again.

torchrun --nproc-per-node 4 -m tests.dist.hf_weights_worker MODELS OUT
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megapack import Layout, launch
from megapack.config.sections import ModelConfig
from megapack.cost import LayerSplit
from megapack.hf import export_hf, load_hf_weights
from megapack.model import build_model, initialize_parallel


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model's folder and the layout that loads it."""

    family: str
    layout: Layout
    split: LayerSplit = field(default_factory=LayerSplit)
    export: Mapping[str, Any] = field(default_factory=dict)


TP_SP = {"tp": 2, "sequence_parallel": True}
CASES = {
    "tp2_pp2": Case(family="qwen3", layout=Layout(**TP_SP, pp=2)),
    "tied_vpp2": Case(family="qwen3_tied", layout=Layout(dp=2, pp=2, vpp=2)),
    "tied_uneven": Case(
        family="qwen3_tied",
        layout=Layout(dp=2, pp=2),
        split=LayerSplit(num_layers_in_first_pipeline_stage=1),
    ),
    "cp2_shards": Case(
        family="llama", layout=Layout(cp=2, dp=2), export={"max_shard_bytes": 100_000}
    ),
    "ep4_etp1": Case(family="qwen3_moe", layout=Layout(**TP_SP, dp=2, ep=4, etp=1)),
    "ep2_etp1": Case(family="qwen3_moe", layout=Layout(**TP_SP, dp=2, ep=2, etp=1)),
    "ep2_etp2": Case(family="mixtral", layout=Layout(**TP_SP, dp=2, ep=2, etp=2)),
    "shared_pp2": Case(family="qwen2_moe", layout=Layout(**TP_SP, pp=2, ep=2, etp=1)),
    "latent": Case(family="deepseek_v3", layout=Layout(**TP_SP, pp=2, ep=2, etp=1)),
    "glm": Case(family="glm4_moe", layout=Layout(**TP_SP, dp=2, ep=2, etp=1)),
}


def run_case(name: str, case: Case, models: Path, out: Path, device: Any) -> None:
    """Load a folder, and export it again."""
    layout = case.layout
    folder = models / case.family
    model = ModelConfig.from_hf(str(folder))
    initialize_parallel(layout, 1)
    chunks = build_model(
        model,
        layout,
        vocab_size=model.vocab_size,
        seed=1,
        distributed_optimizer=False,
        stage_layers=case.split.stage_layers(
            model.num_layers, pp=layout.pp, vpp=layout.vpp, num_mtp_layers=0
        ),
        draws_weights=False,
    )
    loaded = load_hf_weights(chunks, folder, device=device)
    export_hf(chunks, out / name, like=folder, device=device, **case.export)
    if dist.get_rank() == 0:
        print(name, loaded, flush=True)
    parallel_state.destroy_model_parallel()


def main(models: str, out: str) -> None:
    """Run all cases whose model is there."""
    device = launch.start("cpu")
    for name, case in CASES.items():
        if (Path(models) / case.family).is_dir():
            run_case(name, case, Path(models), Path(out), device)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
