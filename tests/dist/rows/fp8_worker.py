"""Packed rows in FP8 on this rank, against one sample at a time, and against bf16.

torchrun --nproc-per-node 2 -m tests.dist.rows.fp8_worker OUT_DIR CASE ...
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import Layout, Plan, build_dp_schedule, cpu, launch
from megapack.config.sections import ModelConfig
from megapack.cpu.te import around
from megapack.loss import SFT
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.rows.fp8_cases import CASES, MODELS, PAIRS, Fp8Case
from tests.dist.setup import build_chunks, error_of


class QuantizedWeights:
    """Counts the weights that kernels quantize."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, name: str, run: Any, args: Any, kwargs: Any) -> Any:
        """Run a stand-in."""
        self.count += name == "quantize" and isinstance(args[0], torch.nn.Parameter)
        return run(*args, **kwargs)


def plans(batch: SampleBatch, layout: Layout) -> tuple[Plan, Plan]:
    """One step of rows of many samples, and one of rows of one sample."""
    return (
        build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=256),
        build_dp_schedule(batch.lengths, layout=layout, micro_batch_size=1),
    )


def gradient(adapter: ScheduleAdapter, plan: Plan, batch: SampleBatch) -> Tensor:
    """This rank's gradients of a step."""
    for chunk in adapter.chunks:
        chunk.zero_grad_buffer()
    adapter.step(plan, batch, objective=SFT())
    return torch.cat([p.main_grad.flatten() for c in adapter.chunks for p in c.parameters()])


def logprobs(adapter: ScheduleAdapter, plan: Plan, batch: SampleBatch) -> Tensor:
    """Log-probs of all response tokens of this rank's samples."""
    values = adapter.forward(plan, batch)["logprobs"]
    kept = [
        value[1:][batch.response_mask(i)[1:].bool()]
        for i, value in enumerate(values)
        if value is not None
    ]
    return torch.cat(kept)


def scales(adapter: ScheduleAdapter) -> Tensor:
    """Scales and largest values of delayed scaling in all layers; empty under other recipes."""
    found = [torch.zeros(0)]
    for chunk in adapter.chunks:
        for module in chunk.modules():
            for name in ("scaling_fwd", "scaling_bwd"):
                state = getattr(module, "fp8_meta", {}).get(name)
                if state is not None and hasattr(state, "amax_history"):
                    found += [state.scale, state.amax_history[1:].flatten()]
    return torch.cat(found)


def relative(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over that of what is wanted."""
    return float((found - wanted).norm() / wanted.norm())


def compared(case: Fp8Case) -> dict[str, Any]:
    """What this rank finds."""
    settings: ModelConfig = dataclasses.replace(MODELS[case.model], fp8=case.recipe)
    layout = dataclasses.replace(case.layout, fp8=settings.fp8_rows)
    batch = problem.make_batch(len(PAIRS), PAIRS)
    packed, single = plans(batch, layout)
    in_bf16 = build_chunks(case.layout, model=dataclasses.replace(settings, fp8=None))
    plain = ScheduleAdapter(in_bf16, layout=case.layout)
    wanted_gradient = gradient(plain, plans(batch, case.layout)[1], batch)
    wanted = logprobs(plain, plans(batch, case.layout)[1], batch)
    rounding = relative(logprobs(plain, plans(batch, case.layout)[0], batch), wanted)
    end_model_parallel()
    adapter = ScheduleAdapter(build_chunks(layout, model=settings), layout=layout)
    # Delayed scaling has the scales of the step before.
    gradient(adapter, packed, batch)
    weights = QuantizedWeights()
    with around(weights):
        found_gradient = gradient(adapter, packed, batch)
    one_by_one = logprobs(adapter, single, batch)
    all_scales = scales(adapter)
    gathered = [torch.empty_like(all_scales) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, all_scales)
    found = {
        "rows": len(packed.steps[0].ranks[0]),
        "samples": max(len(row.samples) for row in packed.steps[0].ranks[0]),
        "packing": relative(logprobs(adapter, packed, batch), one_by_one),
        "bf16 packing": rounding,
        "logprobs": relative(one_by_one, wanted),
        "gradient": relative(found_gradient, wanted_gradient),
        "weights": weights.count,
        "scales": len(all_scales),
        "differing scales": sum(int((other != all_scales).sum()) for other in gathered),
        "unaligned": error_of(lambda: ScheduleAdapter(adapter.chunks, layout=case.layout)),
    }
    end_model_parallel()
    return found


def main(out_dir: str, *names: str) -> None:
    """Run the cases; each rank writes what it found."""
    cpu.enable(capability=CASES[names[0]].capability)
    launch.start("cpu")
    found = {name: compared(CASES[name]) for name in names}
    (Path(out_dir) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
