"""Runs a step with joint backwards and the same step with split ones; compares gradients' bits.

torchrun --nproc-per-node N -m tests.dist.split_backward_worker OUT_DIR CASE ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config
from torch import Tensor

from megapack import Layout, build_dp_schedule, launch
from megapack.loss import SFT
from megapack.model.settings import Setting
from megapack.model.weight_gradients import WeightGradients
from megapack.schedule import ScheduleAdapter, checks
from tests.dist import problem
from tests.dist.delayed_linear import linear_layers
from tests.dist.setup import build_chunks

OBJECTIVES = {"sft": SFT(), "grpo": problem.OBJECTIVE}


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
    """Linear layers of `delayed_linear`; "" for Megatron's."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that differ from the variant's."""


class Later:
    """Puts weight gradients off in Megatron's own schedule, by a number of backwards."""

    def __init__(self, chunks: list[Any], lag: int) -> None:
        self.gradients = WeightGradients(chunks)
        self.waiting: deque[int] = deque()
        self.num_backwards = 0
        self.num_put_off = 0
        """Products with weights that did not run in their backward."""
        self._chunks = chunks
        self._lag = lag

    @contextlib.contextmanager
    def splitting(self) -> Iterator[None]:
        """Within the block, Megatron's schedule splits its backwards."""
        original = schedules.backward_step
        config = get_model_config(self._chunks[0])

        def backward_step(*args: Any, **kwargs: Any) -> Any:
            number = self.num_backwards
            self.num_backwards += 1
            # The chunk only chooses DDP's config, which the chunks share.
            with self.gradients.deferring(0, number), contextlib.ExitStack() as stack:
                for chunk in self._chunks:
                    stack.enter_context(chunk.no_sync())
                result = original(*args, **kwargs)
            self.num_put_off += sum(map(len, self.gradients._kept[0, number]))
            self.waiting.append(number)
            while len(self.waiting) > self._lag:
                self.gradients.run(0, self.waiting.popleft())
            return result

        def finalize(*args: Any, **kwargs: Any) -> None:
            while self.waiting:
                self.gradients.run(0, self.waiting.popleft())
            for chunk in self._chunks:
                if chunk.ddp_config.overlap_grad_reduce:
                    chunk.start_grad_sync()
            finalize_model_grads(*args, **kwargs)

        schedules.backward_step = backward_step
        config.finalize_model_grads_func = finalize
        try:
            yield
        finally:
            schedules.backward_step = original
            config.finalize_model_grads_func = finalize_model_grads


class Run:
    """A case's model, and steps on it."""

    def __init__(self, case: Case, *, splits_backward: bool) -> None:
        model = dataclasses.replace(
            problem.MODELS[case.variant][0], recompute=case.recompute, **case.model
        )
        with linear_layers(case.layers):
            self.chunks = build_chunks(
                case.layout,
                model=model,
                distributed_optimizer=case.distributed,
                reduction={name: Setting(value) for name, value in case.ddp.items()} or None,
                splits_backward=splits_backward,
            )
        self.later = Later(self.chunks, case.lag)
        self._adapter = ScheduleAdapter(self.chunks, layout=case.layout)
        self._batch = problem.make_batch()
        self._plan = build_dp_schedule(
            self._batch.lengths, layout=case.layout, max_tokens_per_gpu=64
        )
        self._objective = OBJECTIVES[case.objective]

    def step(self) -> dict[str, Tensor]:
        """Gradients of a step with joint backwards."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._adapter.step(self._plan, self._batch, objective=self._objective)
        return {
            f"{number}.{name}": param.main_grad.clone()
            for number, chunk in enumerate(self.chunks)
            for name, param in chunk.named_parameters()
            if param.requires_grad
        }

    def split_step(self) -> dict[str, Tensor]:
        """Gradients of a step with split backwards."""
        checks.check_split_backward(self.chunks, get_model_config(self.chunks[0]))
        with self.later.splitting():
            return self.step()


def run_case(case: Case) -> dict[str, Any]:
    """Names of gradients that differ between joint and split backwards, and other facts."""
    run = Run(case, splits_backward=False)
    joint = run.step()
    if case.layers:
        parallel_state.destroy_model_parallel()
        run = Run(case, splits_backward=True)
    split = run.split_step()
    # Afterwards the model is as it was.
    again = run.split_step() if case.layers else run.step()
    return {
        "different": [name for name, value in joint.items() if not value.equal(split[name])],
        "unsteady": [name for name, value in joint.items() if not value.equal(again[name])],
        "largest": max(float((joint[name] - split[name]).abs().max()) for name in joint),
        "zero": [name for name, value in joint.items() if not value.any()],
        "num_backwards": run.later.num_backwards,
    }


PP2 = Layout(pp=2)
TP2_SP = Layout(tp=2, sequence_parallel=True)
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 5000}
CASES = {
    "single": Case(layout=Layout()),
    "single_full": Case(layout=Layout(), recompute="full"),
    "single_moe": Case(layout=Layout(), variant="moe"),
    # Without updates of the biases, which would change the experts of the second step.
    "single_moe_shared": Case(
        layout=Layout(), variant="moe_shared", model={"moe_bias_update_rate": 0.0}
    ),
    "single_mla": Case(layout=Layout(), variant="mla"),
    "single_mla_full": Case(layout=Layout(), variant="mla", recompute="full"),
    "single_mtp": Case(layout=Layout(), variant="mtp"),
    "single_other": Case(layout=Layout(), variant="other"),
    "single_bias": Case(layout=Layout(), model={"qkv_bias": True}),
    "single_te": Case(layout=Layout(), layers="te", recompute="full"),
    "pp2_te_fused": Case(layout=PP2, layers="te_fused", model={"qkv_bias": True}),
    "dp2_te_quantized": Case(
        layout=Layout(dp=2), ddp=OVERLAP, layers="te_quantized", model={"qkv_bias": True}
    ),
    "dp2_te_fused": Case(layout=Layout(dp=2), ddp=OVERLAP, layers="te_fused"),
    "pp2": Case(layout=PP2),
    "pp2_full": Case(layout=PP2, recompute="full", objective="sft"),
    "tp2": Case(layout=Layout(tp=2)),
    "tp2_sp": Case(layout=TP2_SP),
    "tp2_sp_mla": Case(layout=TP2_SP, variant="mla"),
    "dp2_overlap": Case(layout=Layout(dp=2), ddp=OVERLAP),
    "dp2_sharded_overlap": Case(layout=Layout(dp=2), ddp=OVERLAP, distributed=True),
    "dp2_ep2": Case(layout=Layout(dp=2, ep=2), variant="moe", ddp=OVERLAP),
    "pp2_vpp2": Case(layout=Layout(pp=2, vpp=2), recompute="full"),
    "dp2_pp2": Case(layout=Layout(dp=2, pp=2), ddp=OVERLAP, distributed=True),
    "pp4": Case(layout=Layout(pp=4)),
    "tp2_sp_pp2": Case(layout=Layout(tp=2, pp=2, sequence_parallel=True), recompute="full"),
}


def main(out_dir: str, *names: str) -> None:
    """Run the cases and write `OUT_DIR/rank<r>.json`."""
    launch.start("cpu")
    results = {}
    for name in names:
        results[name] = run_case(CASES[name])
        parallel_state.destroy_model_parallel()
    path = Path(out_dir) / f"rank{dist.get_rank()}.json"
    path.write_text(json.dumps(results), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
