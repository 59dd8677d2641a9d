"""Runs cases of one world size on this rank and writes their results.

torchrun --nproc-per-node 2 -m tests.dist.exactness.worker REFERENCE OUT CASE ...
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_model_config
from torch import Tensor

from megapack import launch
from megapack.job.gpt.init import local_slice
from megapack.loss import GRPO
from megapack.model.experts.router import moe_layers
from megapack.model.head import unwrapped
from megapack.model.parameters import global_parameters, is_expert
from megapack.plan import Plan
from megapack.schedule import ScheduleAdapter
from tests.dist import problem
from tests.dist.exactness.cases import EVERY_CASE, Case
from tests.dist.exactness.expected import (
    auxiliary_gradients,
    auxiliary_metrics,
    expected_mtp,
    expected_step,
    tokens_per_expert,
)
from tests.dist.exactness.staged import StagedAdapter
from tests.dist.groups import end_model_parallel
from tests.dist.setup import build_chunks


def run_case(
    case: Case, samples: list[dict[str, Any]], own_precision: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Run a forward pass and a step of a case; returns errors against the reference, and facts.

    Args:
        samples: the reference's samples, in fp32.
        own_precision: the reference's samples in the case's own precision, if that is lower.
    """
    model, temperature = case.model, problem.MODELS[case.variant][1]
    chunks = build_chunks(case.layout, model=model, split=case.split)
    for name, value in case.config.items():
        setattr(get_model_config(chunks[0]), name, value)
    adapter_class = StagedAdapter if case.staged else ScheduleAdapter
    adapter = adapter_class(
        chunks, layout=case.layout, logprob_chunk_tokens=16, temperature=temperature
    )
    batch = problem.make_batch(case.num_samples)
    plan = case.plan()
    routing = problem.choices(model.num_layers) if case.variant == "moe_replay" else None
    forward_plan = case.forward_plan()
    outputs = adapter.forward(forward_plan, batch, entropy=True, routing=routing)
    # One DP rank owns all samples.
    if routing is None and case.layout.dp > 1:
        check_own_outputs(adapter, forward_plan, batch, outputs["logprobs"])
    replayed = _replay_facts(adapter, case, samples) if model.num_experts else {}
    result = adapter.step(
        plan,
        batch,
        objective=problem.OBJECTIVE,
        weighting=case.weighting,
        norm_constant=case.norm_constant,
        routing=routing,
    )
    loss, grads = expected_step(case, plan, samples)
    errors = gradient_errors(chunks, grads)
    if own_precision is not None:
        errors |= own_errors(expected_step(case, plan, own_precision)[1], grads)
    return {
        "loss": result.loss,
        "expected_loss": loss,
        "metrics": result.metrics,
        **errors,
        **logprob_errors(outputs, plan, batch, samples),
        **_auxiliary_facts(plan, samples, grads),
        **(bias_facts(chunks, tokens_per_expert(plan, samples)) if model.num_experts else {}),
        **replayed,
        "expected_mtp": expected_mtp(case, plan, samples),
        # This runs another step, so it comes after everything that reads the first one.
        "square_to_forward": squared_difference(adapter, plan, batch, outputs["logprobs"], routing),
        "facts": _facts(plan, chunks),
    }


def _replay_facts(
    adapter: ScheduleAdapter, case: Case, samples: list[dict[str, Any]]
) -> dict[str, float]:
    """Compare the experts recorded in one plan with the reference's, and replay them in another."""
    batch = problem.make_batch(case.num_samples)
    plan = case.plan()
    other = dataclasses.replace(case, budget=90).plan()
    first = adapter.forward(plan, batch, record_routing=True)
    again = adapter.forward(other, batch, routing=first["routing"], record_routing=True)
    wrong = 0
    differences = []
    for i in plan.steps[0].kept_samples:
        one = first["routing"][i]
        two = again["routing"][i]
        assert one is not None
        assert two is not None
        assert torch.equal(one, two)
        if case.variant != "moe_replay":
            chosen = samples[i]["auxiliary"]["chosen"]
            wrong += int(chosen.gather(2, one.long()).logical_not().sum())
        differences.append((first["logprobs"][i] - again["logprobs"][i]).abs().max())
    return {
        "plans_differ": float(plan.digest() != other.digest()),
        "wrong_choices": wrong,
        "replay_error": float(torch.stack(differences).max()),
    }


def _auxiliary_facts(
    plan: Plan, samples: list[dict[str, Any]], grads: dict[str, Tensor]
) -> dict[str, Any]:
    auxiliary = auxiliary_gradients(plan, samples)
    if not auxiliary:
        return {}
    parts = [torch.cat([g.flatten() for g in gs.values()]).norm() for gs in (auxiliary, grads)]
    return {
        "expected_metrics": auxiliary_metrics(plan, samples),
        "auxiliary_share": float(parts[0] / parts[1]),
    }


def bias_facts(chunks: list[Any], counts: Tensor) -> dict[str, int]:
    """Number of biases that must move towards equal token counts, and that moved wrongly."""
    moved = 0
    wrong = 0
    for chunk in chunks:
        for layer in unwrapped(chunk).decoder.layers:
            router = getattr(getattr(layer, "mlp", None), "router", None)
            if router is None or router.expert_bias is None:
                continue
            count = counts[moe_layers(router.config).index(layer.layer_number - 1)].float()
            want = (count.mean() - count).sign() * router.config.moe_router_bias_update_rate
            moved += int(want.count_nonzero())
            wrong += int((router.expert_bias - want).abs().gt(1e-7).sum())
    return {"num_biases": moved, "wrong_biases": wrong}


def check_own_outputs(
    adapter: ScheduleAdapter,
    plan: Plan,
    batch: Any,
    logprobs: list[Tensor | None],
    routing: list[Tensor] | None = None,
) -> None:
    """Check that the scope "dp_rank" gives each stage only the samples of its own rank."""
    own = {i for row in plan.steps[0].ranks[adapter.dp_rank] for i in row.samples}
    outputs = adapter.forward(plan, batch, scope="dp_rank", routing=routing)
    for i, value in enumerate(outputs["logprobs"]):
        assert (value is not None) == (i in own)
        assert value is None or torch.equal(value, logprobs[i])


def gradient_errors(chunks: list[Any], grads: dict[str, Tensor]) -> dict[str, float]:
    dense = parallel_state.get_tensor_model_parallel_group()
    experts = parallel_state.get_expert_tensor_parallel_group()
    sums = torch.zeros(2, dtype=torch.float64)
    errors = []
    # A small sum of large terms has the rounding errors of the terms.
    smallest = 1e-4 * torch.stack([grad.norm() for grad in grads.values()]).norm()
    for chunk in chunks:
        for name, param in global_parameters(chunk):
            if not param.requires_grad:
                assert param.grad is None, f"{name} is frozen and has a gradient"
                continue
            group = experts if is_expert(name) else dense
            want = local_slice(grads[name], param, group.rank(), group.size())
            assert param.main_grad.dtype == torch.float32
            error = (param.main_grad.double() - want).norm()
            sums += torch.stack([error**2, want.norm() ** 2])
            errors.append(error / max(grads[name].norm(), smallest))
    dist.all_reduce(sums)
    error, norm = sums.sqrt().tolist()
    check_norm(chunks, grads, error)
    # Python's max could ignore a NaN.
    worst = float(torch.stack(errors).max()) if errors else 0.0
    return {"gradient_error": error / norm, "gradient_norm": norm, "worst_parameter": worst}


def check_norm(chunks: list[Any], grads: dict[str, Tensor], error: float) -> None:
    """Check that Megatron's optimizer finds the norm of the reference's gradients on every rank.

    Args:
        grads: those of the whole model.
        error: the norm of the gradients' error, over all ranks.
    """
    frozen: list[Any] = [None] * dist.get_world_size()
    params = [item for chunk in chunks for item in global_parameters(chunk)]
    dist.all_gather_object(frozen, [name for name, param in params if not param.requires_grad])
    trained = set(grads).difference(*frozen)
    want = float(torch.stack([grads[name].norm() for name in trained]).norm()) if trained else 0.0
    norm = optimizer_norm(chunks)
    assert abs(norm - want) <= error + 1e-6 * want, f"gradient norm {norm}, not {want}"


def optimizer_norm(chunks: list[Any]) -> float:
    """The gradient norm by which Megatron's optimizer clips."""
    config = get_model_config(chunks[0])
    settings = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    # Else the next backward would add to them.
    optimizer.zero_grad()
    return norm


def own_errors(own: dict[str, Tensor], grads: dict[str, Tensor]) -> dict[str, float]:
    """The gradient error of the lower precision alone, one sample at a time."""
    error = torch.stack([(own[name] - want).norm() for name, want in grads.items()]).norm()
    norm = torch.stack([want.norm() for want in grads.values()]).norm()
    return {"one_sample_gradient_error": float(error / norm)}


def logprob_errors(
    outputs: dict[str, list[Tensor | None]], plan: Plan, batch: Any, samples: list[dict[str, Any]]
) -> dict[str, float]:
    kept = set(plan.steps[0].kept_samples)
    differences = []
    for name in ("logprobs", "entropy"):
        for i, value in enumerate(outputs[name]):
            assert (value is not None) == (i in kept)
            if value is None:
                continue
            mask = batch.response_mask(i).clone()
            mask[0] = False
            assert not value[~mask].any()
            differences.append((value[1:] - samples[i][name])[mask[1:]].abs())
    all_differences = torch.cat(differences)
    return {
        "logprob_mean_error": float(all_differences.mean()),
        "logprob_max_error": float(all_differences.max()),
        "num_logprobs": all_differences.numel(),
    }


def squared_difference(
    adapter: ScheduleAdapter,
    plan: Plan,
    batch: Any,
    logprobs: list[Tensor | None],
    routing: list[Tensor] | None,
) -> float:
    """Mean squared difference between a training step's log-probs and those of a forward pass.

    It is 0 only if all bits are equal.
    """
    anchored = [torch.zeros(()) if value is None else value for value in logprobs]
    batch.set_field("ref_logprobs", anchored)
    squares = GRPO(kl_coef=1.0, kl_kind="k2")
    return 2 * adapter.step(plan, batch, objective=squares, routing=routing).metrics["kl_ref"]


def _num_frozen_ranks(chunks: list[Any]) -> int:
    """Number of ranks whose parameters are all frozen."""
    params = [param for chunk in chunks for param in chunk.parameters()]
    frozen = torch.tensor(float(not any(param.requires_grad for param in params)))
    dist.all_reduce(frozen)
    return int(frozen)


def _num_layers(chunks: list[Any]) -> list[list[int]]:
    """The transformer layers of each chunk in model order, numbered from 0 over the model."""
    own = [[layer.layer_number - 1 for layer in unwrapped(c).decoder.layers] for c in chunks]
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[Any] = [None] * group.size()
    dist.all_gather_object(stages, own, group=group)
    return [layers for chunk in zip(*stages, strict=True) for layers in chunk]


def _facts(plan: Plan, chunks: list[Any]) -> dict[str, Any]:
    step = plan.steps[0]
    rows = [row for rank in step.ranks for row in rank]
    counts = [len(rank) for rank in step.ranks]
    group = step.group_size or 1
    return {
        "chunks": len(chunks),
        "layers": _num_layers(chunks),
        "counts": counts,
        "padding": any(not row.samples for row in rows),
        "dummies": any(row.samples and row.row_tokens > row.padded_tokens for row in rows),
        "dropped": bool(step.dropped_rollouts),
        "remainder": counts[0] % group > 0,
        "frozen_ranks": _num_frozen_ranks(chunks),
        "packed": any(len(row.samples) > 1 for row in rows),
        "row_lengths": len({row.row_tokens for row in rows}),
    }


@functools.cache
def _samples(reference: str, name: str) -> list[dict[str, Any]]:
    # A file holds tens of thousands of small tensors: load each at most once per job.
    samples: list[dict[str, Any]] = torch.load(Path(reference) / f"{name}.pt")
    return samples


def main(reference: str, out: str, names: list[str]) -> None:
    """Run the named cases; rank 0 writes `out`."""
    launch.start("cpu")
    results = {}
    cases = EVERY_CASE
    for name in names:
        samples = (_samples(reference, model) for model in cases[name].references)
        results[name] = run_case(cases[name], *samples)
        worst = torch.tensor(results[name]["worst_parameter"])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        results[name]["worst_parameter"] = float(worst)
        end_model_parallel()
    if os.environ.get("RANK", "0") == "0":
        with open(out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    launch.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
