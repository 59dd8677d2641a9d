"""Runs cases of `row_problem` of one world size on this rank and writes their results.

torchrun --nproc-per-node 2 -m tests.dist.rows.row_worker CASES_MODULE REFERENCE OUT CASE ...
"""

from __future__ import annotations

import dataclasses
import importlib
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
from tests.dist.exactness.worker import (
    gradient_errors,
    logprob_errors,
    own_errors,
    squared_difference,
)
from tests.dist.executor import executor
from tests.dist.losses.sequence_worker import output_error
from tests.dist.rows.row_problem import KINDS, MODELS, PRECISE, RowCase, Samples, result_name
from tests.dist.setup import build_chunks


class Run:
    """One model of a case, on this rank."""

    def __init__(self, case: RowCase, name: str, *, value_head: bool) -> None:
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
            executor=executor(),
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
        """Steps of an objective by the case's plan and by the plain one, against the reference."""
        samples = self.case.samples_of(kind)
        plan, plain = self.case.plans(samples)
        precise = PRECISE.get(self.name, self.name)
        reference = expected[result_name(precise, samples, kind)]
        plain_result = self.step(plain, samples, kind)
        result = self.step(plan, samples, kind)
        errors = gradient_errors(self.chunks, reference["grads"])
        if precise != self.name:
            own = expected[result_name(self.name, samples, kind)]
            errors |= own_errors(own["grads"], reference["grads"])
        return {
            "loss": result.loss,
            "expected_loss": reference["loss"],
            "plain_loss": plain_result.loss,
            "metrics": result.metrics,
            "plain_metrics": plain_result.metrics,
            "expected_metrics": reference["metrics"],
            **errors,
            **self.extras(plan, plain, samples, reference),
            **self.output_errors(plan, samples, reference["outputs"]),
            "facts": self.case.facts(samples, plan),
        }

    def extras(
        self, plan: Plan, plain: Plan, samples: Samples, expected: dict[str, Any]
    ) -> dict[str, Any]:
        """More results of a problem's own; called between a step and `output_errors`."""
        return {}

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


def run_case(case: RowCase, expected: dict[str, Any], run_class: type[Run]) -> dict[str, Any]:
    """Run all objectives of a case."""
    results: dict[str, Any] = {}
    for value_head in (False, True):
        kinds = [kind for kind in case.kinds if KINDS[kind].value_head == value_head]
        if not kinds:
            continue
        run = run_class(case, case.model_of(kinds[0]), value_head=value_head)
        for kind in kinds:
            results[kind] = _worst_of_ranks(run.kind(kind, expected))
        parallel_state.destroy_model_parallel()
    return results


_WORST = ("worst_parameter", "output_error", "wrong_biases", "wrong_choices", "replay_error")
"""Results of which the largest of all ranks counts."""


def _worst_of_ranks(result: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in _WORST if name in result]
    worst = torch.tensor([float(result[name]) for name in names])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return result | dict(zip(names, worst.tolist(), strict=True))


def main(
    cases: str, reference: str, out: str, names: list[str], run_class: type[Run] = Run
) -> None:
    """Run the named cases of a module; rank 0 writes `out`."""
    all_cases = importlib.import_module(cases).ALL_CASES
    launch.start("cpu")
    expected = torch.load(reference)
    results = {name: run_case(all_cases[name], expected, run_class) for name in names}
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    launch.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
