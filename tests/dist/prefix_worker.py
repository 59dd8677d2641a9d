"""Runs cases with shared prefixes of one world size on this rank and writes their results.

torchrun --nproc-per-node 2 -m tests.dist.prefix_worker REFERENCE OUT CASE ...
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megapack import launch
from megapack.loss.sequence import ValueLoss
from megapack.plan import Plan
from megapack.schedule import ScheduleAdapter
from tests.dist.prefix_cases import ALL_CASES
from tests.dist.prefix_problem import (
    KINDS,
    MODELS,
    PRECISE,
    PrefixCase,
    Samples,
    result_name,
    sharing_facts,
)
from tests.dist.sequence_worker import output_error
from tests.dist.setup import build_chunks
from tests.dist.worker import gradient_errors, logprob_errors, own_errors, squared_difference


class Run:
    """One model of a case, on this rank."""

    def __init__(self, case: PrefixCase, name: str, *, value_head: bool) -> None:
        self.case = case
        self.name = name
        self.value_head = value_head
        # By shape and loss mask: objectives with the same ones have the same forwards.
        self.outputs: dict[tuple[str, int], dict[str, float]] = {}
        model = dataclasses.replace(MODELS[name], recompute=case.recompute, freeze=case.frozen)
        self.chunks = build_chunks(case.layout, model=model, value_head=value_head)
        self.adapter = ScheduleAdapter(
            self.chunks,
            layout=case.layout,
            logprob_chunk_tokens=16,
            head="value" if value_head else "vocabulary",
        )

    def routing(self, samples: Samples) -> Any:
        return samples.routing if self.name == "moe_replay" else None

    def step(self, plan: Plan, samples: Samples, kind: str) -> Any:
        """One step from gradients of 0."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            for param in chunk.parameters():
                param.grad = None
        return self.adapter.step(
            plan,
            samples.batch,
            objective=KINDS[kind].objective,
            weighting=KINDS[kind].weighting,
            routing=self.routing(samples),
        )

    def kind(self, kind: str, expected: dict[str, Any]) -> dict[str, Any]:
        """Steps of an objective with and without sharing, against the reference."""
        samples = self.case.samples_of(kind)
        plan = self.case.plan(samples, shared=True)
        alone = self.case.plan(samples, shared=False)
        precise = PRECISE.get(self.name, self.name)
        reference = expected[result_name(precise, samples, kind)]
        unshared = self.step(alone, samples, kind)
        shared = self.step(plan, samples, kind)
        errors = gradient_errors(self.chunks, reference["grads"])
        if precise != self.name:
            own = expected[result_name(self.name, samples, kind)]
            errors |= own_errors(own["grads"], reference["grads"])
        return {
            "loss": shared.loss,
            "expected_loss": reference["loss"],
            "unshared_loss": unshared.loss,
            "metrics": shared.metrics,
            "unshared_metrics": unshared.metrics,
            "expected_metrics": reference["metrics"],
            **errors,
            **self.output_errors(plan, samples, reference["outputs"]),
            "facts": sharing_facts(samples, plan),
        }

    def output_errors(self, plan: Plan, samples: Samples, expected: list[Any]) -> dict[str, float]:
        """Errors of forward outputs, and whether the training forward has the same bits.

        The latter runs another step, so it comes after what reads the gradients.
        """
        key = (samples.shape, sum(samples.batch.num_loss_tokens))
        if key not in self.outputs:
            find = self._value_errors if self.value_head else self._logprob_errors
            self.outputs[key] = find(plan, samples, expected)
        return self.outputs[key]

    def _logprob_errors(
        self, plan: Plan, samples: Samples, expected: list[Any]
    ) -> dict[str, float]:
        routing = self.routing(samples)
        batch = samples.batch
        outputs = self.adapter.forward(plan, batch, entropy=True, routing=routing)
        square = squared_difference(self.adapter, plan, batch, outputs["logprobs"], routing)
        return {**logprob_errors(outputs, plan, batch, expected), "square_to_forward": square}

    def _value_errors(self, plan: Plan, samples: Samples, expected: list[Any]) -> dict[str, float]:
        batch = samples.batch
        outputs = self.adapter.forward(plan, batch)
        batch.set_field("returns", outputs["values"])
        squares = self.adapter.step(plan, batch, objective=ValueLoss()).loss
        error = output_error(outputs, expected, batch)
        return {"output_error": error, "square_to_forward": squares}


def run_case(case: PrefixCase, expected: dict[str, Any]) -> dict[str, Any]:
    """Run all objectives of a case."""
    results: dict[str, Any] = {}
    for value_head in (False, True):
        kinds = [kind for kind in case.kinds if KINDS[kind].value_head == value_head]
        if not kinds:
            continue
        run = Run(case, case.model_of(kinds[0]), value_head=value_head)
        for kind in kinds:
            results[kind] = _worst_of_ranks(run.kind(kind, expected))
        parallel_state.destroy_model_parallel()
    return results


def _worst_of_ranks(result: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in ("worst_parameter", "output_error") if name in result]
    worst = torch.tensor([result[name] for name in names])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return result | dict(zip(names, worst.tolist(), strict=True))


def main(reference: str, out: str, names: list[str]) -> None:
    """Run the named cases; rank 0 writes `out`."""
    launch.start("cpu")
    expected = torch.load(reference)
    results = {name: run_case(ALL_CASES[name], expected) for name in names}
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    launch.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
