"""Runs a step with joint backwards and the same step with split ones; compares gradients' bits.

torchrun --nproc-per-node N -m tests.dist.schedule.split_backward_worker OUT_DIR CASE ...
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megapack import Layout, build_dp_schedule
from megapack.loss import SFT
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.groups import end_model_parallel
from tests.dist.losses.sequence_problem import KINDS
from tests.dist.schedule.delayed_linear import linear_layers
from tests.dist.setup import build_chunks, report_cases
from tests.hand_made_orders import with_weights_later
from tests.te_python import runs_te

OBJECTIVES = {
    "sft": SFT(),
    "grpo": problem.OBJECTIVE,
    "gspo": KINDS["gspo"].objective,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, a model and an objective."""

    layout: Layout
    variant: str = "plain"
    recompute: str = "none"
    objective: str = "grpo"
    lag: int = 3
    """Weight gradients run this many backwards later."""
    ddp: dict[str, Any] = field(default_factory=dict)
    distributed: bool = False
    layers: str = ""
    """Linear layers of `delayed_linear`; "" for Megatron's, or Transformer Engine's in a job that
    has it."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that differ from the variant's."""


class Run:
    """A case's model, and steps on it."""

    def __init__(self, case: Case, *, splits_backward: bool) -> None:
        model = dataclasses.replace(
            problem.shallow(problem.MODELS[case.variant][0]),
            recompute=case.recompute,
            **case.model,
        )
        with linear_layers(case.layers):
            self.chunks = build_chunks(
                case.layout,
                model=model,
                distributed_optimizer=case.distributed,
                reduction=case.ddp or None,
                splits_backward=splits_backward,
            )
        self._adapter = ScheduleAdapter(self.chunks, layout=case.layout, executor="operations")
        self._batch = problem.make_batch()
        self._plan = build_dp_schedule(
            self._batch.lengths, layout=case.layout, max_tokens_per_gpu=64
        )
        self._case = case

    def step(self, *, splits: bool) -> dict[str, Tensor]:
        """Gradients of a step.

        Args:
            splits: whether backwards are split.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        plan = with_weights_later(self._plan, self._case.lag) if splits else self._plan
        self._adapter.step(plan, self._batch, objective=OBJECTIVES[self._case.objective])
        return {
            f"{number}.{name}": param.main_grad.clone()
            for number, chunk in enumerate(self.chunks)
            for name, param in chunk.named_parameters()
            if param.requires_grad
        }


def run_case(case: Case) -> dict[str, Any]:
    """Names of gradients that differ: between joint and split backwards, and between joint ones
    before and after."""
    run = Run(case, splits_backward=False)
    joint = run.step(splits=False)
    if case.layers or runs_te():
        end_model_parallel()
        run = Run(case, splits_backward=True)
    split = run.step(splits=True)
    again = run.step(splits=False)
    return {
        "num_gradients": len(joint),
        "different": [name for name, value in joint.items() if not value.equal(split[name])],
        "unsteady": [name for name, value in joint.items() if not value.equal(again[name])],
        "largest": max(float((joint[name] - split[name]).abs().max()) for name in joint),
        "zero": [name for name, value in joint.items() if not value.any()],
    }


PP2 = Layout(pp=2)
PP2_VPP2 = Layout(pp=2, vpp=2)
DP2_PP2 = Layout(dp=2, pp=2)
TP2_SP = Layout(tp=2, sequence_parallel=True)
TP2_SP_PP2 = Layout(tp=2, pp=2, sequence_parallel=True)
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 5000}
CASES = {
    # Without updates of the biases, which would change the experts of the second step.
    "single_moe_latent": Case(
        layout=Layout(), variant="moe_latent", model={"moe_bias_update_rate": 0.0}
    ),
    "single_mla_selective": Case(
        layout=Layout(),
        variant="mla",
        recompute="selective",
        model={"recompute_modules": ("core_attn", "mlp")},
    ),
    "single_mtp": Case(layout=Layout(), variant="mtp"),
    "single_other": Case(layout=Layout(), variant="other"),
    "single_full": Case(layout=Layout(), recompute="full"),
    "single_bias": Case(
        layout=Layout(), model={"gradient_accumulation_fusion": False, "qkv_bias": True}
    ),
    "single_te": Case(layout=Layout(), layers="te", recompute="full"),
    "pp2_te_fused": Case(layout=PP2, layers="te_fused", model={"qkv_bias": True}),
    "dp2_te_quantized": Case(
        layout=Layout(dp=2), ddp=OVERLAP, layers="te_quantized", model={"qkv_bias": True}
    ),
    "pp2_full_sft": Case(layout=PP2, recompute="full", objective="sft"),
    "tp2_bias": Case(layout=Layout(tp=2), model={"qkv_bias": True}),
    "tp2_sp_mla": Case(layout=TP2_SP, variant="mla"),
    "dp2_sharded_overlap": Case(layout=Layout(dp=2), ddp=OVERLAP, distributed=True),
    "dp2_ep2": Case(layout=Layout(dp=2, ep=2), variant="moe", ddp=OVERLAP),
    "pp2_vpp2": Case(layout=PP2_VPP2),
    "dp2_pp2": Case(layout=DP2_PP2, ddp=OVERLAP, distributed=True),
    "pp4": Case(layout=Layout(pp=4)),
    "tp2_sp_pp2_full": Case(layout=TP2_SP_PP2, recompute="full"),
}

TE_CASES = (
    *("single_moe_latent", "single_mla_selective", "single_mtp", "single_full", "single_bias"),
    *("pp2_vpp2", "dp2_sharded_overlap"),
)
"""Those that CI also runs with Transformer Engine's own layers."""


def main(out_dir: str, *names: str) -> None:
    """Run the cases and write `OUT_DIR/rank<r>.json`."""
    report_cases(out_dir, lambda name: run_case(CASES[name]), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
