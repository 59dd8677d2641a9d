"""Runs cases with wide rows of one world size on this rank and writes their results.

torchrun --nproc-per-node 2 -m tests.dist.rows.wide_worker CASES_MODULE REFERENCE OUT CASE ...
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from megapack.model.experts.router import PackedRouter
from megapack.model.head import unwrapped
from megapack.plan import Plan
from tests.dist.exactness.worker import bias_facts, check_own_outputs
from tests.dist.rows.row_problem import MODELS, RowCase, Samples
from tests.dist.rows.row_worker import Run, main


class WideRun(Run):
    """A model of a case with wide rows: also biases of experts, recorded experts, and scopes."""

    def __init__(self, case: RowCase, name: str, *, value_head: bool) -> None:
        super().__init__(case, name, value_head=value_head)
        modules = [module for chunk in self.chunks for module in unwrapped(chunk).modules()]
        self._routers = [module for module in modules if isinstance(module, PackedRouter)]
        # By shape: objectives with the same samples have the same forwards.
        self._replayed: dict[str, dict[str, Any]] = {}

    def step(self, plan: Plan, samples: Samples, kind: str) -> Any:
        self._reset_biases()
        return super().step(plan, samples, kind)

    def extras(
        self, plan: Plan, plain: Plan, samples: Samples, expected: dict[str, Any]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if MODELS[self.name].moe_bias_update_rate:
            counts = torch.stack([chosen.sum(0) for chosen in expected["chosen"]]).sum(0)
            found |= bias_facts(self.chunks, counts)
            self._reset_biases()
        if MODELS[self.name].num_experts and not self.value_head:
            if samples.shape not in self._replayed:
                facts = self._replay_facts(plan, plain, samples, expected["chosen"])
                self._replayed[samples.shape] = facts
            found |= self._replayed[samples.shape]
        return found

    def _logprob_errors(
        self, plan: Plan, samples: Samples, expected: list[Any]
    ) -> dict[str, float]:
        routing = self.routing(samples)
        outputs = self.adapter.forward(plan, samples.batch, routing=routing)
        check_own_outputs(self.adapter, plan, samples.batch, outputs["logprobs"], routing)
        return super()._logprob_errors(plan, samples, expected)

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

    def _reset_biases(self) -> None:
        """Each step begins with the biases of the reference, which are 0."""
        for router in self._routers:
            if router.expert_bias is not None:
                router.expert_bias.zero_()
                router.local_tokens_per_expert.zero_()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:], WideRun)
