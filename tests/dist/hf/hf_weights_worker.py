"""Loads Hugging Face folders on layouts, exports them again, and fails on one rank.

torchrun --nproc-per-node 4 -m tests.dist.hf.hf_weights_worker MODELS OUT CASE ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megapack import Layout, launch
from megapack.cost import LayerSplit
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt import build_model, initialize_parallel
from megapack.job.hf import export_hf, load_hf_weights
from megapack.job.hf.blocks import own_blocks
from megapack.job.hf.shards import ShardWriter
from tests.dist.groups import end_model_parallel
from tests.dist.setup import error_of
from tests.unit.job.hf.tiny_llama import read_folder


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model's folder, the layout that loads it, and what the export changes."""

    family: str
    layout: Layout
    split: LayerSplit = field(default_factory=LayerSplit)
    dtype: str = "fp32"
    value_head: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)
    export: Mapping[str, Any] = field(default_factory=dict)


WITH_MTP = {"mtp_num_layers": 1}
TP_SP = {"tp": 2, "sequence_parallel": True}
CASES = {
    "tp2_pp2": Case(family="qwen3", layout=Layout(**TP_SP, pp=2)),
    "value": Case(family="qwen3", layout=Layout(**TP_SP, pp=2), value_head=True),
    "tied_vpp2": Case(family="qwen3_tied", layout=Layout(dp=2, pp=2, vpp=2)),
    "tied_uneven": Case(
        family="qwen3_tied",
        layout=Layout(dp=2, pp=2),
        split=LayerSplit(pipeline_model_parallel_layout="Et|t*3L"),
    ),
    "cp2_shards": Case(
        family="qwen2", layout=Layout(cp=2, dp=2), export={"max_shard_bytes": 100_000}
    ),
    "ep4_etp1": Case(family="qwen3_moe", layout=Layout(**TP_SP, dp=2, ep=4, etp=1)),
    "ep2_etp2": Case(family="mixtral", layout=Layout(**TP_SP, dp=2, ep=2, etp=2)),
    "shared_pp2": Case(family="qwen2_moe", layout=Layout(**TP_SP, pp=2, ep=2, etp=1)),
    "latent": Case(family="deepseek_v3", layout=Layout(**TP_SP, pp=2, ep=2, etp=1)),
    "latent_bf16": Case(family="deepseek_v3", layout=Layout(pp=2, dp=2, ep=2), dtype="bf16"),
    "sparse": Case(family="deepseek_v32", layout=Layout(**TP_SP, pp=2, ep=2, etp=1)),
    "moonlight": Case(family="moonlight", layout=Layout(dp=2, pp=2, vpp=2, ep=2)),
    "no_prefix": Case(family="qwen3_embedding", layout=Layout(**TP_SP, pp=2)),
    "minimax": Case(family="minimax_m2", layout=Layout(**TP_SP, dp=2, ep=2, etp=1)),
    "ernie": Case(family="ernie4_5_moe", layout=Layout(**TP_SP, dp=2, ep=2, etp=1)),
    "hunyuan": Case(family="hunyuan_v1_moe", layout=Layout(**TP_SP, pp=2, ep=2, etp=1)),
    "glm4": Case(family="glm4", layout=Layout(**TP_SP, pp=2)),
    "mtp_kept": Case(family="mimo", layout=Layout(**TP_SP, pp=2)),
    "mtp_swapped": Case(family="mimo", layout=Layout(**TP_SP, pp=2), keys=WITH_MTP),
    "mtp_latent": Case(
        family="glm4_moe_lite", layout=Layout(**TP_SP, pp=2, ep=2, etp=1), keys=WITH_MTP
    ),
    "phi": Case(family="phi3", layout=Layout(**TP_SP, pp=2)),
    "gemma2": Case(family="gemma2", layout=Layout(**TP_SP, pp=2)),
    "gemma4_vision": Case(family="gemma4", layout=Layout(**TP_SP, pp=2)),
    "gemma4_experts": Case(family="gemma4_experts", layout=Layout(**TP_SP, dp=2, ep=2, etp=1)),
}
AS_HYBRID = {"megatron_class": "hybrid"}
HYBRID_CASES = {
    "next_tp2_pp2": Case(family="qwen3_next", layout=Layout(**TP_SP, pp=2, etp=1)),
    "next_value": Case(family="qwen3_next", layout=Layout(**TP_SP, pp=2), value_head=True),
    "next_bf16": Case(family="qwen3_next", layout=Layout(**TP_SP, pp=2, etp=1), dtype="bf16"),
    "nemotron_bf16": Case(family="nemotron_h", layout=Layout(dp=2, pp=2, ep=2), dtype="bf16"),
    "vision_tied_pp2": Case(
        family="qwen3_5", layout=Layout(**TP_SP, pp=2), export={"max_shard_bytes": 100_000}
    ),
    "stacked_ep4": Case(family="qwen3_5_moe", layout=Layout(**TP_SP, dp=2, ep=4, etp=1)),
    "next_mtp": Case(family="qwen3_next", layout=Layout(dp=2, pp=2, vpp=2, ep=2), keys=WITH_MTP),
    "nemotron_tp2_pp2": Case(family="nemotron_h", layout=Layout(**TP_SP, pp=2, etp=1)),
    "nemotron_uneven": Case(
        family="nemotron_h",
        layout=Layout(dp=2, pp=2),
        split=LayerSplit(pipeline_model_parallel_layout="Et*3|t*5L"),
    ),
    "super_kept": Case(family="nemotron_super", layout=Layout(dp=2, pp=2, ep=2)),
    "super_mtp": Case(
        family="nemotron_super", layout=Layout(**TP_SP, pp=2, ep=2, etp=1), keys=WITH_MTP
    ),
    "tied_vpp2_hybrid": Case(family="qwen3_tied", layout=Layout(dp=2, pp=2, vpp=2), keys=AS_HYBRID),
}
"""Cases that need HybridModel."""
ALL_CASES = CASES | HYBRID_CASES


def build(case: Case, folder: Path) -> list[Any]:
    """This rank's chunks, with weights as they were allocated."""
    layout = case.layout
    model = ModelConfig.from_hf(str(folder), dtype=case.dtype, **case.keys)
    initialize_parallel(layout, 1)
    split = case.split.stage_layers(
        model.num_layers,
        pp=layout.pp,
        vpp=layout.vpp,
        num_mtp_layers=model.mtp_num_layers,
    )
    assert model.vocab_size is not None
    return build_model(
        model,
        layout,
        vocab_size=model.vocab_size,
        seed=1,
        distributed_optimizer=False,
        stage_layers=split,
        value_head=case.value_head,
        draws_weights=False,
    )


def largest_padding(chunks: list[Any], vocab_size: int) -> float:
    """The largest weight of this rank's rows of the padded vocabulary; -1 if it has none."""
    largest = -1.0
    for block, values in own_blocks(chunks):
        if block.key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            padding = values[max(0, vocab_size - block.start[0]) :]
            if len(padding):
                largest = max(largest, float(padding.abs().max()))
    return largest


def run_case(name: str, case: Case, models: Path, out: Path, device: Any) -> dict[str, Any]:
    """Load a folder, and export it again."""
    folder = models / case.family
    chunks = build(case, folder)
    for _, values in own_blocks(chunks):
        values.fill_(7.0)
    loaded = load_hf_weights(chunks, folder, device=device)
    exported = export_hf(chunks, out / name, like=folder, device=device, **case.export)
    found = {
        "bytes": loaded.num_bytes,
        "held": sum(values.nbytes for _, values in own_blocks(chunks)),
        "padding": largest_padding(chunks, 320),
        "files": exported.num_files,
    }
    end_model_parallel()
    return found


def run_errors(models: Path, out: Path, device: torch.device) -> dict[str, str]:
    """Errors of a load without a tensor, of an export that fails on rank 2, and where a file is."""
    case = CASES["tp2_pp2"]
    folder = models / case.family
    chunks = build(case, folder)
    load_hf_weights(chunks, folder, device=device)
    before = [values.clone() for _, values in own_blocks(chunks)]
    found = {"load": error_of(lambda: load(chunks, models / "qwen3_tied", device))}
    after = [values for _, values in own_blocks(chunks)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    def export() -> None:
        export_hf(chunks, out / "failed", like=folder, device=device)

    full = OSError(28, "No space left on device")
    effect = full if dist.get_rank() == 2 else None
    real = ShardWriter.write

    def write(self: ShardWriter, *args: Any) -> None:
        if effect is not None:
            raise effect
        real(self, *args)

    with mock.patch.object(ShardWriter, "write", write):
        found["export"] = error_of(export)
    (out / "failed").touch()
    dist.barrier()
    found["exists"] = error_of(export)
    end_model_parallel()
    tied = out / "own_head"
    if dist.get_rank() == 0:
        write_own_head(models / "qwen3_tied", tied)
    dist.barrier()
    chunks = build(CASES["tied_vpp2"], tied)
    found["own_head"] = error_of(lambda: load(chunks, tied, device))
    end_model_parallel()
    return found


def write_own_head(folder: Path, copy: Path) -> None:
    """Copy a tied folder, with an output layer that differs from the embedding in its last row."""
    tensors = read_folder(folder)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1.0
    copy.mkdir()
    (copy / "config.json").write_text((folder / "config.json").read_text())
    save_file({**tensors, "lm_head.weight": head}, copy / "model.safetensors")


def load(chunks: list[Any], folder: Path, device: torch.device) -> None:
    """Load, without a result."""
    load_hf_weights(chunks, folder, device=device)


def main(models: str, out: str, *names: str) -> None:
    """Run the cases; every rank writes what it found in each."""
    device = launch.start("cpu")
    for name in names:
        if name == "errors":
            found: Mapping[str, Any] = run_errors(Path(models), Path(out), device)
        else:
            found = run_case(name, ALL_CASES[name], Path(models), Path(out), device)
        folder = Path(out, f"{name}_ranks")
        folder.mkdir(exist_ok=True)
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
