"""Runs a step with each of Megatron's recomputed modules, and compares gradients.

torchrun --nproc-per-node N -m tests.dist.model.recompute_worker OUT CASE ...
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megapack import Layout, Policy, build_dp_schedule, launch
from megapack.job.config.sections import ModelConfig
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.setup import build_chunks
from tests.hand_made_orders import with_weights_later

_BIASED = {"linear_bias": True, "qkv_bias": True}
_EXPERTS = dataclasses.replace(problem.MOE_MODEL, moe_balance_loss_coef=0.0, moe_z_loss_coef=0.0)
MODELS = {
    "bias": dataclasses.replace(problem.MODEL, **_BIASED),
    "gpt2": dataclasses.replace(problem.OTHER_MODEL, **_BIASED),
    "sandwich": dataclasses.replace(problem.MODEL, norm_placement="sandwich", **_BIASED),
    "experts": dataclasses.replace(_EXPERTS, moe_first_dense_layers=1, **_BIASED),
    "shared": dataclasses.replace(
        problem.MOE_SHARED_MODEL, moe_bias_update_rate=0.0, moe_first_dense_layers=1
    ),
    "mla": problem.MLA_MODEL,
    "mla_plain": dataclasses.replace(problem.MLA_MODEL, qk_layernorm=False, q_lora_rank=None),
    "mtp": dataclasses.replace(problem.MTP_MODEL, **_BIASED),
}
# Limit on virtual memory: a recursion without end takes all that there is.
_MAX_BYTES = 24 << 30


def of_modules(name: str, modules: tuple[str, ...]) -> ModelConfig:
    """A model that recomputes modules, also those that only a config of Megatron's own can name."""
    model = dataclasses.replace(problem.shallow(MODELS[name]), recompute="selective")
    object.__setattr__(model, "recompute_modules", modules)
    return model


def gradients(model: ModelConfig, layout: Layout, *, later: bool) -> dict[str, Tensor]:
    """Gradients of a step.

    Args:
        later: weight gradients have operations of their own.
    """
    chunks = build_chunks(layout, model=model)
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            # Biases of 0 would hide one that is added twice.
            if name.endswith("bias"):
                param.data += 0.1
    batch = problem.make_batch(6)
    plan = build_dp_schedule(
        batch.lengths, layout=layout, max_tokens_per_gpu=64, policy=Policy(search=0)
    )
    if later:
        plan = with_weights_later(plan, 2)
    adapter = ScheduleAdapter(chunks, layout=layout)
    adapter.step(plan, batch, objective=problem.OBJECTIVE)
    found = {
        name: param.main_grad.clone()
        for chunk in chunks
        for name, param in chunk.named_parameters()
    }
    end_model_parallel()
    return found


def run_case(name: str) -> dict[str, Any]:
    """What differs from the step without recompute; `name` is MODEL/MODULE+MODULE, or .../later."""
    model, names, *others = name.split("/")
    layout = Layout(tp=dist.get_world_size(), sequence_parallel=dist.get_world_size() > 1)
    later = "later" in others
    whole = gradients(problem.shallow(MODELS[model]), layout, later=later)
    again = gradients(of_modules(model, tuple(names.split("+"))), layout, later=later)
    return {
        "num_gradients": len(whole),
        "different": [one for one, value in whole.items() if _error(value, again[one]) > 1e-6],
        "zero": [one for one, value in again.items() if not value.any()],
    }


def _error(want: Tensor, value: Tensor) -> float:
    return float((want - value).norm() / want.norm())


def main(out: str, *names: str) -> None:
    """Run the cases; rank 0 writes `out`."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    launch.start("cpu")
    results = {name: run_case(name) for name in names}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
