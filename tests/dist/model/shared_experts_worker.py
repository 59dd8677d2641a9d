"""Experts on rows with and without shared prefixes: metrics, gradients, biases, recorded experts.

torchrun --nproc-per-node 2 -m tests.dist.model.shared_experts_worker OUT_DIR
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import Layout, SharedPrefixes, build_dp_schedule, launch
from megapack.job.config.sections import ModelConfig
from megapack.loss import SFT
from megapack.model.experts.router import PackedRouter
from megapack.model.head import unwrapped
from megapack.plan import Plan
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.setup import build_chunks, error_of

# With both losses and the bias.
MODEL = dataclasses.replace(problem.MOE_BIAS_MODEL, num_layers=2, moe_z_loss_coef=0.03)
MTP_MODEL = dataclasses.replace(MODEL, mtp_num_layers=1)
RECOMPUTED_MODEL = dataclasses.replace(MODEL, recompute="full")
CASES = {
    "mtp_dp2_ep2": (Layout(dp=2, ep=2), MTP_MODEL),
    "mtp_cp2": (Layout(cp=2), MTP_MODEL),
    "cp2_recompute": (Layout(cp=2), RECOMPUTED_MODEL),
    "tp2_sp_recompute": (Layout(tp=2, sequence_parallel=True), RECOMPUTED_MODEL),
}


def make_batch() -> tuple[SampleBatch, list[list[int]]]:
    """Four prompts with five answers each; in each group two answers begin alike."""
    rng = random.Random(3)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(problem.VOCAB_SIZE) for _ in range(rng.randrange(low, high))]

    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    for _ in range(4):
        prompt = tokens(12, 20)
        longer = tokens(10, 14)
        beginnings = [[], longer, [], longer, []]
        prompts += [prompt] * 5
        answers += [beginning + tokens(1, 8) for beginning in beginnings]
    batch = SampleBatch.from_prompt_response(
        [torch.tensor(own) for own in prompts], [torch.tensor(own) for own in answers], {}
    )
    return batch, [p + a for p, a in zip(prompts, answers, strict=True)]


class Model:
    """A model on a layout; each step begins with the same weights and biases."""

    def __init__(self, layout: Layout, settings: ModelConfig) -> None:
        self.chunks = build_chunks(layout, model=settings)
        self.adapter = ScheduleAdapter(self.chunks, layout=layout)
        modules = [module for chunk in self.chunks for module in unwrapped(chunk).modules()]
        self.routers = [module for module in modules if isinstance(module, PackedRouter)]

    def step(
        self, plan: Plan, batch: SampleBatch, routing: Sequence[Tensor | None] | None
    ) -> dict[str, Any]:
        """Metrics, gradients and biases of one step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for router in self.routers:
            router.expert_bias.zero_()
            router.local_tokens_per_expert.zero_()
        result = self.adapter.step(plan, batch, objective=SFT(), routing=routing)
        grads = [p.main_grad.double().flatten() for c in self.chunks for p in c.parameters()]
        return {
            "metrics": {"loss": result.loss, **result.metrics},
            "gradient": torch.cat(grads),
            "biases": torch.stack([router.expert_bias.clone() for router in self.routers]),
        }


def compared(layout: Layout, settings: ModelConfig) -> dict[str, Any]:
    """Facts and differences between rows that share nothing and rows that share prefixes."""
    model = Model(layout, settings)
    batch, tokens = make_batch()
    plain = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=80)
    recorded = model.adapter.forward(plain, batch, record_routing=True)["routing"]
    prefixes = SharedPrefixes.from_samples(
        tokens, routing=recorded, mtp_num_layers=settings.mtp_num_layers
    )
    shared = build_dp_schedule(
        batch.lengths, layout=layout, max_tokens_per_gpu=80, prefixes=prefixes
    )
    again = model.adapter.forward(shared, batch, record_routing=True)["routing"]
    first = model.step(plain, batch, None)
    others = {"free": model.step(shared, batch, None)}
    # Experts that no router would choose show that the recorded ones are replayed.
    turned = [None if value is None else (value + 1) % 4 for value in recorded]
    turned_plain = model.step(plain, batch, turned)
    others["replayed"] = model.step(shared, batch, recorded)
    found: dict[str, Any] = {
        "saved": [sum(row.shared_tokens for row in rank) for rank in shared.steps[0].ranks],
        "recorded_alike": _are_equal(recorded, again),
        "gradient_norm": float(first["gradient"].norm()),
        "biases_moved": int(first["biases"].count_nonzero()),
        "turned_differs": _error(turned_plain, first),
        "turned_error": _error(model.step(shared, batch, turned), turned_plain),
        "metrics": first["metrics"],
        "refusal": _refusal(model, shared, batch, recorded),
    }
    for name, other in others.items():
        found[name] = {
            "metrics": other["metrics"],
            "gradient_error": _error(other, first),
            "biases_alike": torch.equal(other["biases"], first["biases"]),
        }
    return found


def _are_equal(ones: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    pairs = list(zip(ones, others, strict=True))
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def _error(one: dict[str, Any], other: dict[str, Any]) -> float:
    return float((one["gradient"] - other["gradient"]).norm() / other["gradient"].norm())


def _refusal(
    model: Model, plan: Plan, batch: SampleBatch, recorded: Sequence[Tensor | None]
) -> str:
    """The error for a routing in which one sample of the last DP rank leaves its family."""
    row = next(row for row in plan.steps[0].ranks[-1] if row.shared_tokens)
    assert plan.prefixes is not None
    sample = next(i for i in plan.prefixes.order if i in row.samples)
    broken = list(recorded)
    value = broken[sample]
    assert value is not None
    value = value.clone()
    value[2, 1] = (value[2, 1] + 1) % 4
    broken[sample] = value
    return error_of(lambda: _run(model, plan, batch, broken))


def _run(model: Model, plan: Plan, batch: SampleBatch, routing: Sequence[Tensor | None]) -> None:
    model.adapter.step(plan, batch, objective=SFT(), routing=routing)


def main(out_dir: str) -> None:
    """Run all cases; each rank writes what it found."""
    launch.start("cpu")
    found = {}
    for name, (layout, settings) in CASES.items():
        found[name] = compared(layout, settings)
        end_model_parallel()
    (Path(out_dir) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
