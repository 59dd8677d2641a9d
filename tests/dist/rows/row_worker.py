"""Runs cases of rows of one world size on this rank and writes their results.

torchrun --nproc-per-node 2 -m tests.dist.rows.row_worker REFERENCE OUT CASE ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import launch
from megapack.loss.sequence import ValueLoss
from megapack.model import carried
from megapack.model.attention import sdpa, sparse
from megapack.model.attention.packed import row_params
from megapack.model.attention.row import RowView
from megapack.model.experts.router import PackedRouter
from megapack.model.head import unwrapped
from megapack.plan import Plan
from megapack.rows.chain import Link
from megapack.rows.packed import PackedRow
from megapack.schedule import ScheduleAdapter, chains, runner
from tests.dist.exactness.worker import (
    bias_facts,
    check_own_outputs,
    gradient_errors,
    logprob_errors,
    own_errors,
    squared_difference,
)
from tests.dist.executor import executor
from tests.dist.groups import end_model_parallel
from tests.dist.rows.row_case import RowCase, row_facts
from tests.dist.rows.row_cases import ALL_CASES
from tests.dist.rows.row_problem import KINDS, MODELS, PRECISE, Samples, result_name
from tests.dist.setup import build_chunks
from tests.te_python import runs_te

_FIND_GRADIENTS = chains.ChainLosses._find_gradients


def _without_a_piece(self: chains.ChainLosses, forwards: Sequence[Any]) -> Tensor:
    """The chain's loss, whose second piece gets no gradients."""
    loss = _FIND_GRADIENTS(self, forwards)
    forwards[1].gradients = [torch.zeros_like(x) for x in forwards[1].gradients]
    return loss


def _own_keys_only(key: Tensor, value: Tensor, order_K: Tensor, group: Any) -> Any:
    """Keys and values as if the other ranks of the row had this rank's."""
    times = group.size() if group is not None else 1
    copies = torch.cat([torch.cat([key, value], dim=-1)] * times).index_select(0, order_K)
    return copies.split([key.shape[-1], value.shape[-1]], dim=-1)


def _without_earlier_pieces(row: PackedRow, group: Any, link: Link | None) -> Any:
    branches = tuple(dataclasses.replace(own, parent=max(own.parent, -1)) for own in row.branches)
    return row_params(dataclasses.replace(row, piece=None, branches=branches), group)


_ATTENTION = sdpa.path_causal_attention


def _without_windows(*args: Any, window: int | None, **kwargs: Any) -> Tensor:
    return _ATTENTION(*args, window=None, **kwargs)


def _without_sinks(*args: Any, sink_H: Tensor, **kwargs: Any) -> Tensor:
    return _ATTENTION(*args, sink_H=sink_H - 100, **kwargs)


def _one_each(row: RowView) -> Tensor:
    assert row.branch_of_T is not None
    return (row.branch_of_T >= 0).long()


_MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "no windows": (sdpa, "path_causal_attention", _without_windows),
    "no sinks": (sdpa, "path_causal_attention", _without_sinks),
    "no carried gradients": (carried, "_leaf", lambda value, link: value.detach().clone()),
    "no exchanged keys": (sdpa, "gather_rows", _own_keys_only),
    "no carried keys": (runner, "row_params", _without_earlier_pieces),
    "all keys are chosen": (sparse, "chosen_keys", lambda scores, visible, top_k: visible),
    "shared tokens count once": (RowView, "copies_T", property(_one_each)),
    "no losses of a piece": (chains.ChainLosses, "_find_gradients", _without_a_piece),
}


def _layers(case: RowCase) -> contextlib.AbstractContextManager[None]:
    """Within the block, models are built of the case's recurrent layers."""
    if not case.stock:
        return contextlib.nullcontext()
    # Not at the top: it needs Triton.
    from tests import stock_mixers

    return stock_mixers.of_hybrids()


class Run:
    """One model of a case, on this rank."""

    def __init__(self, case: RowCase, name: str, *, value_head: bool) -> None:
        self.case = case
        self.name = name
        self.value_head = value_head
        # By shape and loss mask: objectives with the same ones have the same plans and forwards.
        self._plans: dict[tuple[str, int], tuple[Plan, Plan]] = {}
        self._outputs: dict[tuple[str, int], dict[str, Any]] = {}
        model = dataclasses.replace(MODELS[name], recompute=case.recompute, freeze=case.frozen)
        # Layers of Transformer Engine put weight gradients off in every plan, or in none.
        weights_later = case.lag is not None or (runs_te() and case.policy.backward == "split")
        with _layers(case):
            self.chunks = build_chunks(
                case.layout,
                model=model,
                split=case.split,
                value_head=value_head,
                splits_backward=runs_te() and weights_later,
            )
        self.adapter = ScheduleAdapter(
            self.chunks,
            layout=case.layout,
            logprob_chunk_tokens=16,
            head="value" if value_head else "vocabulary",
            executor="operations" if weights_later else executor(),
        )
        modules = [module for chunk in self.chunks for module in unwrapped(chunk).modules()]
        self._routers = [module for module in modules if isinstance(module, PackedRouter)]

    def routing(self, samples: Samples) -> Any:
        return samples.routing if self.name == "moe_replay" else None

    def step(self, plan: Plan, samples: Samples, kind: str) -> Any:
        """One step from gradients of 0 and the biases of the reference."""
        self._reset_biases()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            for param in chunk.parameters():
                param.grad = None
        with self._mutated():
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
        key = (samples.shape, sum(samples.batch.num_loss_tokens))
        if key not in self._plans:
            self._plans[key] = self.case.plans(samples)
        plan, plain = self._plans[key]
        precise = PRECISE.get(self.name, self.name)
        reference = expected[result_name(precise, samples, kind)]
        plain_result = self.step(plain, samples, kind)
        result = self.step(plan, samples, kind)
        errors = gradient_errors(self.chunks, reference["grads"])
        if precise != self.name:
            own = expected[result_name(self.name, samples, kind)]
            errors |= own_errors(own["grads"], reference["grads"])
        if MODELS[self.name].moe_bias_update_rate:
            counts = torch.stack([chosen.sum(0) for chosen in reference["chosen"]]).sum(0)
            errors |= bias_facts(self.chunks, counts)
        if key not in self._outputs:
            # This runs another step, so it comes after what reads the gradients and biases.
            self._outputs[key] = self._compare_outputs(plan, plain, samples, reference)
        return {
            "loss": result.loss,
            "expected_loss": reference["loss"],
            "plain_loss": plain_result.loss,
            "metrics": result.metrics,
            "plain_metrics": plain_result.metrics,
            "expected_metrics": reference["metrics"],
            **errors,
            **self._outputs[key],
            "facts": row_facts(samples, plan),
        }

    def _compare_outputs(
        self, plan: Plan, plain: Plan, samples: Samples, reference: dict[str, Any]
    ) -> dict[str, Any]:
        """Errors of forward outputs, and whether the training forward has the same bits."""
        self._reset_biases()
        if self.value_head:
            return self._value_errors(plan, samples, reference["outputs"])
        found: dict[str, Any] = {}
        if MODELS[self.name].num_experts:
            found |= self._replay_facts(plan, plain, samples, reference["chosen"])
        return found | self._logprob_errors(plan, samples, reference["outputs"])

    def _logprob_errors(
        self, plan: Plan, samples: Samples, expected: list[Any]
    ) -> dict[str, float]:
        routing = self.routing(samples)
        batch = samples.batch
        outputs = self.adapter.forward(plan, batch, entropy=True, routing=routing)
        check_own_outputs(self.adapter, plan, batch, outputs["logprobs"], routing)
        square = squared_difference(self.adapter, plan, batch, outputs["logprobs"], routing)
        return {**logprob_errors(outputs, plan, batch, expected), "square_to_forward": square}

    def _value_errors(self, plan: Plan, samples: Samples, expected: list[Any]) -> dict[str, float]:
        batch = samples.batch
        outputs = self.adapter.forward(plan, batch)
        batch.set_field("returns", outputs["values"])
        squares = self.adapter.step(plan, batch, objective=ValueLoss()).loss
        error = output_error(outputs, expected, batch)
        return {"output_error": error, "square_to_forward": squares}

    def _replay_facts(
        self, plan: Plan, plain: Plan, samples: Samples, chosen: list[Tensor]
    ) -> dict[str, Any]:
        """Experts recorded in one plan, against the reference's, and replayed in the other one."""
        batch = samples.batch
        forward = self.adapter.forward
        given = self.routing(samples)
        recorded = forward(plan, batch, routing=given, record_routing=True)
        replayed = forward(plain, batch, routing=recorded["routing"], record_routing=True)
        own = forward(plan, batch, routing=given, record_routing=True, scope="dp_rank")
        again = forward(plan, batch, routing=own["routing"])
        wrong = 0
        worst = 0.0
        for i, want in enumerate(chosen):
            one = recorded["routing"][i]
            assert one is not None
            assert torch.equal(one, replayed["routing"][i])
            assert own["routing"][i] is None or torch.equal(one, own["routing"][i])
            wrong += int(want.gather(2, one.long()).logical_not().sum())
            # Not bit by bit: alignment padding goes to other experts in a replay, and GEMMs of
            # experts, which hold it too, then have other sizes.
            for other in (replayed, again):
                difference = recorded["logprobs"][i] - other["logprobs"][i]
                worst = max(worst, float(difference.abs().max()))
        return {"wrong_choices": wrong, "replay_error": worst}

    def _mutated(self) -> contextlib.AbstractContextManager[Any]:
        mutation = self.case.mutation
        if not mutation:
            return contextlib.nullcontext()
        if mutation in _MUTATIONS:
            return mock.patch.object(*_MUTATIONS[mutation])
        # Not at the top: Megatron-Core before 0.18 has no hybrid models.
        from tests.dist.rows.hybrid_mutations import MUTATIONS

        return mock.patch.object(*MUTATIONS[mutation])

    def _reset_biases(self) -> None:
        """Each step begins with the biases of the reference, which are 0."""
        for router in self._routers:
            if router.expert_bias is not None:
                router.expert_bias.zero_()
                router.local_tokens_per_expert.zero_()


def run_case(case: RowCase, expected: dict[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Run objectives of a case; all if none is named."""
    results: dict[str, Any] = {}
    for value_head in (False, True):
        kinds = [kind for kind in wanted or case.kinds if KINDS[kind].value_head == value_head]
        if not kinds:
            continue
        run = Run(case, case.model_of(kinds[0]), value_head=value_head)
        for kind in kinds:
            results[kind] = _worst_of_ranks(run.kind(kind, expected))
        end_model_parallel()
    return results


_WORST = ("worst_parameter", "output_error", "wrong_biases", "wrong_choices", "replay_error")
"""Results of which the largest of all ranks counts."""


def _worst_of_ranks(result: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in _WORST if name in result]
    worst = torch.tensor([float(result[name]) for name in names])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return result | dict(zip(names, worst.tolist(), strict=True))


def output_error(outputs: dict[str, Any], values: list[Tensor], batch: Any) -> float:
    """The largest error of values and of scores."""
    worst = 0.0
    for i, value in enumerate(values):
        mask = batch.response_mask(i)[1:]
        own = outputs["values"][i]
        assert not own[1:][~mask].any()
        assert outputs["scores"][i].shape == (1,)
        score = outputs["scores"][i] - value[-1]
        errors = torch.cat([(own[1:] - value[:-1])[mask], score])
        worst = max(worst, float(errors.abs().max()))
    return worst


def main(reference: str, out: str, *names: str) -> None:
    """Run the named cases, as "case" or "case:objective,objective"; rank 0 writes `out`."""
    launch.start("cpu")
    expected = torch.load(reference)
    results = {}
    for name in names:
        case, _, kinds = name.partition(":")
        results[case] = run_case(ALL_CASES[case], expected, kinds.split(",") if kinds else ())
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
