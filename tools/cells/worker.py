"""Runs the main job on this rank and notes what each of its passes gave.

    python -m tools.cells.worker CONFIG OUT               # writes OUT/reference.pt
    python -m tools.cells.worker CONFIG OUT REFERENCE     # on each rank; writes OUT/rank<r>.json

The notes follow the order of the passes, which the reference and the cell have in common: outputs
of forward passes, gradients and weights of each step, and the weights at the end.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

import megapack.job.train.job
import megapack.job.train.learner
from megapack.cli import main as megapack_main
from megapack.job.gpt.init import local_slice
from megapack.job.train.job import Trainer
from megapack.job.train.metrics import training_metrics
from megapack.job.train.passes import BatchPasses
from megapack.model.head import unwrapped
from megapack.model.overlap import finish_param_gathers
from megapack.model.parameters import global_parameters, is_expert
from tools.cells.judge import LEAST_NORM

# Of a rank, beyond what it has at the start. A recomputation without end would take all memory.
_MEMORY_BYTES = 4 << 30
# The norm of one tensor's gradient counts as this share of all, if it is below.
_SMALL = 1e-2
_NOTES: list[dict[str, Any]] = []
_PLACE = ["start"]
_EXPECTED: list[dict[str, Any]] = []


class NotedPasses(BatchPasses):
    """Passes whose results are noted."""

    def gradients(self, batch: Any, index: int, *args: Any, **settings: Any) -> Any:
        """Note gradients, and the weights that they are of, which have been gathered by now."""
        ran = super().gradients(batch, index, *args, **settings)
        note = {
            "kind": f"step {type(self.objective).__name__}",
            "samples": sorted(map(int, batch.numbers[list(batch.plan.steps[index].kept_samples)])),
            "metrics": training_metrics(ran[0]),
        }
        _add(
            note,
            gradients=dict(_gradients(self.adapter.chunks)),
            weights=dict(_weights(self.adapter.chunks)),
        )
        return ran

    def outputs(self, batch: Any, name: str, **settings: Any) -> list[Tensor]:
        """Note the output of each sample."""
        values = super().outputs(batch, name, **settings)
        note = {"kind": name, "samples": batch.numbers.tolist()}
        _add(note, outputs={str(i): (value, None, None) for i, value in enumerate(values)})
        return values


class NotedTrainer(Trainer):
    """A job whose last weights are noted."""

    def run(self) -> Path:
        """Train, and note the weights."""
        _PLACE.append("run")
        path = super().run()
        models = {"end": self.chunks} | (
            {} if self.critic is None else {"end of the critic": self.critic.chunks}
        )
        for kind, chunks in models.items():
            finish_param_gathers(chunks)
            _add({"kind": kind, "samples": []}, weights=dict(_weights(chunks)))
        return path


# A value, and of this rank's part the parameter that it is of and the elements that are known.
_Part = tuple[Tensor, Any, slice | None]


def _weights(chunks: list[Any]) -> Iterator[tuple[str, _Part]]:
    for chunk in chunks:
        for name, param in global_parameters(chunk):
            yield name, (param.detach(), param, None)
        for layer in unwrapped(chunk).decoder.layers:
            bias = getattr(
                getattr(getattr(layer, "mlp", None), "router", None), "expert_bias", None
            )
            if bias is not None:
                yield f"layer {layer.layer_number} expert_bias", (bias, None, None)


def _gradients(chunks: list[Any]) -> Iterator[tuple[str, _Part]]:
    """A distributed optimizer's rank knows the sum of its part of each bucket only."""
    for chunk in chunks:
        names = {param: name for name, param in global_parameters(chunk)}
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            is_split = group.ddp_config.use_distributed_optimizer
            parts = group.intra_distributed_optimizer_instance_size if is_split else 1
            rank = group.intra_distributed_optimizer_instance_rank if is_split else 0
            for bucket in group.buckets:
                size = bucket.grad_data.numel() // parts
                for param in bucket.params_list:
                    start = param.main_grad.storage_offset() - bucket.grad_data.storage_offset()
                    end = start + param.numel()
                    first, last = max(start, rank * size), min(end, (rank + 1) * size)
                    if param in names and first < last:
                        known = slice(first - start, last - start)
                        yield names[param], (param.main_grad, param, known)


def _add(note: dict[str, Any], **tensors: dict[str, _Part]) -> None:
    """Note tensors: as they are in the reference, else their errors against the reference."""
    if not _EXPECTED:
        copies = {k: {n: v[0].detach().clone() for n, v in t.items()} for k, t in tensors.items()}
        _NOTES.append(note | copies)
        return
    want = _EXPECTED[len(_NOTES)] if len(_NOTES) < len(_EXPECTED) else {"kind": "nothing"}
    note["expected"] = {name: want.get(name) for name in ("kind", "samples", "metrics")}
    if (want["kind"], want.get("samples")) == (note["kind"], note["samples"]):
        note["errors"] = {kind: _errors(parts, want[kind]) for kind, parts in tensors.items()}
    _NOTES.append(note)


def _errors(parts: dict[str, _Part], whole: dict[str, Tensor]) -> dict[str, Any]:
    """Squares of the error and of what is expected, the worst tensor, the largest difference."""
    squares, worst, largest = torch.zeros(2, dtype=torch.float64), (0.0, ""), 0.0
    # Gradients that cancel, as those of biases of keys do, are rounding errors.
    least = _SMALL * max(LEAST_NORM, float(torch.stack([t.norm() for t in whole.values()]).norm()))
    for name, (value, param, known) in parts.items():
        want = whole[name].double()
        norm = max(float(want.norm()), least)
        if param is not None:
            group = (
                parallel_state.get_expert_tensor_parallel_group()
                if is_expert(name)
                else parallel_state.get_tensor_model_parallel_group()
            )
            want = local_slice(want, param, group.rank(), group.size())
        have = value.detach().double()
        if known is not None:
            have, want = have.flatten()[known], want.flatten()[known]
        difference = have - want
        squares += torch.stack([difference.norm() ** 2, want.norm() ** 2])
        if difference.numel():
            largest = max(largest, _number(difference.abs().max()))
        worst = max(worst, (_number(difference.norm() / norm), name))
    return {"squares": squares.tolist(), "worst": worst, "largest": largest, "count": len(parts)}


def _number(value: Tensor) -> float:
    """Python's max could ignore a NaN."""
    return float(torch.nan_to_num(value, nan=torch.inf))


def _note_groups() -> None:
    """Note when groups are made, after which a setting is refused late."""
    original = megapack.job.train.job.initialize_parallel

    def noted(*args: Any) -> Any:
        _PLACE.append("met")
        return original(*args)

    megapack.job.train.job.initialize_parallel = noted


def main(config: str, out: str, reference: str | None = None) -> int:
    """Run the job; returns its exit code."""
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + _MEMORY_BYTES, resource.RLIM_INFINITY))
    if reference is not None:
        _EXPECTED.extend(torch.load(reference))
    megapack.job.train.learner.BatchPasses = NotedPasses
    megapack.job.train.job.Trainer = NotedTrainer
    _note_groups()
    errors = io.StringIO()
    code = 1
    try:
        with contextlib.redirect_stderr(errors):
            code = megapack_main(["train", config])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        print(errors.getvalue(), file=sys.stderr)
        rank = os.environ.get("RANK", "0")
        if reference is None and code == 0:
            torch.save(_NOTES, Path(out) / "reference.pt")
        found = {"code": code, "stderr": errors.getvalue(), "place": _PLACE[-1]}
        found["notes"] = [] if reference is None else _NOTES
        Path(out, f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
