"""Runs models of Hugging Face folders on this rank; rank 0 compares them with transformers.

torchrun --nproc-per-node 2 -m tests.dist.hf.hf_worker FOLDER OUT CASE ...

Gradients take the way of weights: they are written over them and exported, so that they have the
names and shapes of the folder's tensors.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megapack import launch
from megapack.dp_schedule import build_dp_schedule
from megapack.job.config.model import ModelConfig
from megapack.job.gpt import build_model, initialize_parallel
from megapack.job.hf import export_hf, load_hf_weights
from megapack.loss import SFT
from megapack.prefixes import SharedPrefixes
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from tests import hf_mtp
from tests.dist.exactness.worker import optimizer_norm
from tests.dist.executor import executor
from tests.dist.groups import end_model_parallel
from tests.dist.hf.hf_cases import HF_CASES, MAX_TOKENS, MTP, ROWS, HfCase, Rows, samples
from tests.dist.problem import COST
from tests.dist.setup import on_kernels_of_job


def run_case(case: HfCase, folder: Path, device: torch.device) -> dict[str, Any]:
    """Load a folder's model, run a forward pass and a step; returns errors and facts on rank 0."""
    source = folder / case.folder
    model = on_kernels_of_job(ModelConfig.from_hf(str(source), **case.keys))
    assert model.vocab_size is not None
    initialize_parallel(case.layout, seed=1)
    chunks = build_model(
        model, case.layout, vocab_size=model.vocab_size, seed=1, distributed_optimizer=False
    )
    load_hf_weights(chunks, source, device=device)
    adapter = ScheduleAdapter(
        chunks, layout=case.layout, logprob_chunk_tokens=16, executor=executor()
    )
    prompts, responses = samples()
    batch = SampleBatch.from_prompt_response(prompts, responses)
    own = ROWS.get(case.layout_name, Rows(layout=case.layout, max_tokens=MAX_TOKENS))
    prefixes = None
    if own.shares_prefixes:
        prefixes = SharedPrefixes.from_samples([batch.tokens(i) for i in range(len(prompts))])
    options = {"layout": case.layout, "max_tokens_per_gpu": own.max_tokens, "prefixes": prefixes}
    # Rows of several samples, and more than two pieces.
    cost = replace(COST, fixed=1.0)
    plan = build_dp_schedule(batch.lengths, **options, cost=cost, policy=own.policy)
    # A pass without backwards has no pieces.
    forward = build_dp_schedule(batch.lengths, **options, forward_only=True)
    outputs = adapter.forward(forward if "pieces" in case.name else plan, batch, entropy=True)
    step = adapter.step(plan, batch, objective=SFT())
    norm = optimizer_norm(chunks)
    exported = folder / "gradients" / case.name
    exported.parent.mkdir(exist_ok=True)
    show_gradients(chunks)
    export_hf(chunks, exported, like=source, device=device)
    if dist.get_rank():
        return {}
    want = torch.load(folder / case.reference)
    made = [row for rank in plan.steps[0].ranks for row in rank]
    rows = [len(row.samples) for row in made]
    return {
        **output_errors(outputs, want, batch),
        **gradient_errors(read(exported), want["gradients"], untrained(source, case)),
        "optimizer_norm": norm,
        "loss": step.loss,
        "expected_loss": want["loss"],
        "mtp_loss": step.metrics.get("mtp_1_loss", 0.0),
        "expected_mtp_loss": want.get("mtp_loss", 0.0),
        "num_rows": len(rows),
        "most_samples": max(rows),
        "shared_tokens": sum(row.shared_tokens for row in made),
        "most_ranks": max(row.width for row in made),
        "num_pieces": sum(len(row.pieces) for row in made),
    }


def show_gradients(chunks: list[Any]) -> None:
    """Write every gradient over its weight."""
    with torch.no_grad():
        for chunk in chunks:
            for param in chunk.parameters():
                param.copy_(param.main_grad)


def read(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def output_errors(
    outputs: dict[str, list[Tensor | None]], want: dict[str, list[Tensor]], batch: SampleBatch
) -> dict[str, float]:
    """Differences of log-probs and entropies, in nats."""
    errors: dict[str, float] = {}
    for name in ("logprobs", "entropy"):
        differences = []
        for i, (value, expected) in enumerate(zip(outputs[name], want[name], strict=True)):
            assert value is not None
            kept = batch.response_mask(i)
            differences.append((value - expected)[kept].abs())
        every = torch.cat(differences)
        errors[f"{name}_mean_error"] = float(every.mean())
        errors[f"{name}_max_error"] = float(every.max())
        errors["num_tokens"] = every.numel()
    return errors


def untrained(source: Path, case: HfCase) -> set[str]:
    """Names of multi-token prediction that is not trained, which an export copies."""
    file = source / hf_mtp.FILE
    return set() if case.family in MTP or not file.exists() else set(load_file(file))


def gradient_errors(
    got: dict[str, Tensor], want: dict[str, Tensor], untrained: set[str]
) -> dict[str, Any]:
    """Relative differences: of all gradients as one vector, and of the worst tensor."""
    # The expert bias and layer scalars are no parameters, an export copies a vision model, and
    # transformers does not train indexers.
    missing = sorted(want.keys() - got.keys())
    others = ("e_score_correction", "layer_scalar", "visual.", ".indexer.")
    left_over = [
        name
        for name in got.keys() - want.keys() - untrained
        if not any(part in name for part in others)
    ]
    assert not missing, missing
    assert not left_over, left_over
    names = sorted(want)
    differences = torch.stack([(got[name].double() - want[name]).norm() for name in names])
    norms = torch.stack([want[name].double().norm() for name in names])
    # An expert that no token chose has zeros. torch's largest is a NaN if there is one.
    relative = differences / torch.where(norms > 0, norms, 1.0)
    return {
        "gradient_error": float(differences.norm() / norms.norm()),
        "gradient_norm": float(norms.norm()),
        "worst_tensor_error": float(relative.max()),
        "worst_tensor": names[int(relative.argmax())],
        "num_tensors": len(want),
    }


def main(folder: str, out: str, *names: str) -> None:
    """Run the cases; all have the same number of processes."""
    device = launch.start("cpu")
    results = {}
    for name in names:
        results[name] = run_case(HF_CASES[name], Path(folder), device)
        end_model_parallel()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
