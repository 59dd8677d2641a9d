"""Compares packed rows with the one-sample reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megapack import Layout, Plan
from megapack.job.gpt.init import local_slice
from megapack.model.parameters import global_parameters, is_expert
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from tests.dist.exactness.cases import Case
from tests.dist.exactness.expected import expected_step
from tests.dist.exactness.worker import logprob_errors, own_errors
from tests.dist.problem import OBJECTIVE, SEED, VOCAB_SIZE, slow_decays
from tests.gpu import problem

Samples = list[dict[str, Any]]


def build_adapter(
    settings: Any,
    layout: Layout,
    adapter_class: type[ScheduleAdapter] = ScheduleAdapter,
    **options: Any,
) -> ScheduleAdapter:
    """An adapter with its model; Megatron's process groups must exist.

    Args:
        options: arguments of `build_model`.
    """
    from megapack.job.gpt import build_model

    options = {"distributed_optimizer": False, **options}
    chunks = build_model(settings, layout, seed=SEED, vocab_size=VOCAB_SIZE, **options)
    for chunk in chunks:
        slow_decays(chunk)
    return adapter_class(chunks, layout=layout, logprob_chunk_tokens=128)


def exactness(
    adapter: ScheduleAdapter,
    exact: Samples,
    own: Samples | None = None,
    budget: int = problem.BUDGET,
    plan: Plan | None = None,
    batch: SampleBatch | None = None,
    routing: Sequence[Tensor | None] | None = None,
    has_gradients: bool = True,
    sums: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Errors of a forward and a step on all ranks together.

    Args:
        exact: the reference's samples in fp32.
        own: the reference's samples in the model's precision, if that is not fp32.
        budget: tokens of a row.
        plan: another plan than one with this budget.
        batch: its samples, if these are not the problem's.
        routing: the experts to use, see `ScheduleAdapter.step`.
        has_gradients: no for a distributed optimizer, whose ranks have sums of their own part.
        sums: a group over gloo for the errors of all ranks, which may be on GPUs of their own.
    """
    batch = batch or problem.make_batch()
    plan = plan or problem.make_plan(adapter.layout, budget)
    outputs = adapter.forward(plan, batch, entropy=True, routing=routing)
    result = adapter.step(plan, batch, objective=OBJECTIVE, routing=routing)
    case = Case(layout=adapter.layout)
    loss, grads = expected_step(case, plan, exact)
    found = {
        "loss": result.loss,
        "expected_loss": loss,
        **(gradient_errors(adapter.chunks, grads, sums) if has_gradients else {}),
        **logprob_errors(outputs, plan, batch, exact),
        "num_microbatches": plan.steps[0].num_microbatches,
        "most_samples_in_a_row": max(len(mb.samples) for mb in plan.steps[0].ranks[0]),
    }
    if own is not None:
        alone = logprob_errors(one_sample_outputs(own, batch), plan, batch, exact)
        found |= own_errors(expected_step(case, plan, own)[1], grads)
        found["one_sample_logprob_mean_error"] = alone["logprob_mean_error"]
    return found


def gradient_errors(
    chunks: Sequence[Any], grads: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """The gradient's norm over all ranks' parts, and its relative error in that norm."""
    sums = torch.zeros(2, dtype=torch.float64)
    dense = parallel_state.get_tensor_model_parallel_group()
    experts = parallel_state.get_expert_tensor_parallel_group()
    for chunk in chunks:
        for name, param in global_parameters(chunk):
            tp = experts if is_expert(name) else dense
            want = local_slice(grads[name].cpu(), param, tp.rank(), tp.size())
            have = param.main_grad.double().cpu()
            sums += torch.stack([(have - want).norm() ** 2, want.norm() ** 2])
    if dist.get_world_size() > 1:
        dist.all_reduce(sums, group=group)
    error, norm = sums.sqrt().tolist()
    return {"gradient_error": error / norm, "gradient_norm": norm}


def main_gradients(chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Main gradients on the CPU, by name."""
    for chunk in chunks:
        for name, param in global_parameters(chunk):
            yield name, param.main_grad.double().cpu()


def one_sample_outputs(samples: Samples, batch: SampleBatch) -> dict[str, list[Tensor | None]]:
    """The reference's outputs in the adapter's form: a value per token, 0 outside the response."""
    outputs: dict[str, list[Tensor | None]] = {}
    for name in ("logprobs", "entropy"):
        outputs[name] = []
        for i, sample in enumerate(samples):
            values = torch.zeros(batch.length(i))
            values[1:] = sample[name] * batch.response_mask(i)[1:]
            outputs[name].append(values)
    return outputs
