"""The reference of cases of rows: one process, one unpadded sample at a time.

python -m tests.dist.rows.row_reference OUT CASE ...
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from megapack import launch
from megapack.job.gpt import initialize_parallel
from megapack.layout import Layout
from megapack.model.parameters import global_parameters
from tests.dist.exactness.reference import (
    mtp_losses,
    replay,
    run_auxiliary,
    token_losses,
)
from tests.dist.exactness.sparse_reference import has_loss
from tests.dist.losses.sequence_reference import SequenceReference
from tests.dist.rows.row_cases import ALL_CASES
from tests.dist.rows.row_problem import KINDS, MODELS, PRECISE, Samples, result_name


class RowReference(SequenceReference):
    """A stock model on the samples of a shape."""

    def __init__(self, name: str, samples: Samples, *, value_head: bool) -> None:
        super().__init__(
            value_head, settings=MODELS[name], batch=samples.batch, pairs=samples.pairs
        )
        self.settings = MODELS[name]
        self.value_head = value_head
        self.routing = samples.routing if name == "moe_replay" else None
        self.num_tokens = sum(self.batch.num_loss_tokens)
        self._forwards: dict[int, tuple[Tensor, Tensor]] = {}

    def _replay(self, i: int) -> None:
        if self.routing is not None:
            replay(self.model, self.routing[i])

    def forward(self, i: int) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies at all positions, of one forward for all objectives."""
        if i not in self._forwards:
            self._replay(i)
            self._forwards[i] = super().forward(i)
        return self._forwards[i]

    def sft(self) -> Tensor:
        """The mean of the negative log-likelihoods of all samples' tokens."""
        return -torch.cat([self.logprobs(i)[0] for i in self.trained]).mean()

    sft_all = sft

    def grpo(self) -> Tensor:
        losses = []
        for i in self.trained:
            names = ("advantages", "old_logprobs", "ref_logprobs")
            fields = {name: self.response(name, i) for name in names}
            losses.append(token_losses(*self.logprobs(i), fields))
        return torch.cat(losses).mean()

    def ahead(self, weighting: str) -> list[Tensor]:
        """The loss of each depth of multi-token prediction, weighted as the objective."""
        depths = [torch.zeros(()) for _ in range(self.settings.mtp_num_layers)]
        for i in self.trained:
            share = self.num_tokens
            if weighting == "seq-mean-token-mean":
                share = len(self.trained) * self.batch.num_loss_tokens[i]
            mask = self.batch.response_mask(i)
            losses = mtp_losses(self.model, self.batch.tokens(i), mask, 1.0)
            depths = [a + b / share for a, b in zip(depths, losses, strict=True)]
        return depths

    @functools.cached_property
    def auxiliary(self) -> tuple[dict[str, Tensor], dict[str, float], list[Tensor]]:
        """Gradients and values of the losses of experts and indexers, and who chose which experts.

        The losses are means over all tokens of all samples. Choices are bool [tokens, layers,
        experts] per sample; none without experts.
        """
        total = sum(self.batch.lengths)
        chosen = []
        grads: dict[str, Tensor] = {}
        metrics: dict[str, float] = {}
        for i in range(len(self.batch)):
            self._replay(i)
            found = run_auxiliary(self.model, self.batch.tokens(i), self.settings)
            if "chosen" in found:
                chosen.append(found["chosen"])
            for name, grad in found["grads"].items():
                grads[name] = grads.get(name, 0) + grad / total
            for name in ("moe_balance_loss", "moe_z_loss", "indexer_loss"):
                if name in found:
                    metrics[name] = metrics.get(name, 0.0) + found[name] / total
        return grads, metrics, chosen

    def run(self, kind: str) -> dict[str, Any]:
        """Loss, metrics of its parts, and gradients of an objective."""
        auxiliary: dict[str, Tensor] = {}
        metrics: dict[str, float] = {}
        chosen: list[Tensor] = []
        has_losses = self.settings.num_experts or has_loss(self.settings)
        if has_losses and not self.value_head:
            auxiliary, metrics, chosen = self.auxiliary
            metrics = dict(metrics)
        self.model.zero_grad()
        loss = getattr(self, kind)()
        ahead = self.ahead(KINDS[kind].weighting) if self.settings.mtp_num_layers else []
        coef = self.settings.mtp_loss_coef / max(1, len(ahead))
        # The next objective goes back through the same forwards.
        (loss + coef * sum(ahead)).backward(retain_graph=True)
        metrics |= {f"mtp_{k}_loss": float(value) for k, value in enumerate(ahead, start=1)}
        grads = {
            name: torch.zeros_like(param).double() if param.grad is None else param.grad.double()
            for name, param in global_parameters(self.model)
        }
        for name, grad in auxiliary.items():
            grads[name] = grads[name] + grad
        return {
            "loss": float(loss.detach()),
            "grads": grads,
            "metrics": metrics,
            "chosen": chosen,
        }

    @functools.cached_property
    def outputs(self) -> list[Any]:
        """Per sample its values, or its log-probs and entropies."""
        with torch.no_grad():
            return [self._sample_outputs(i) for i in range(len(self.batch))]

    def _sample_outputs(self, i: int) -> Any:
        if self.value_head:
            return self.values(i)
        logprobs, entropy = self.forward(i)
        return {"logprobs": logprobs.detach(), "entropy": entropy.detach()}


def main(path: str, *names: str) -> None:
    """Write loss, gradients and outputs of what the cases train.

    Args:
        names: as "case" or "case:objective,objective".
    """
    launch.start("cpu")
    initialize_parallel(Layout(), 0)
    references: dict[tuple[Any, ...], RowReference] = {}
    results: dict[str, Any] = {}
    for name in names:
        case_name, _, kinds = name.partition(":")
        case = ALL_CASES[case_name]
        for kind in kinds.split(",") if kinds else case.kinds:
            samples = case.samples_of(kind)
            model = case.model_of(kind)
            for own in {model, PRECISE.get(model, model)}:
                result = result_name(own, samples, kind)
                if result in results:
                    continue
                key = (own, samples.shape, KINDS[kind].value_head, kind == "sft_all")
                if key not in references:
                    head = KINDS[kind].value_head
                    references[key] = RowReference(own, samples, value_head=head)
                results[result] = references[key].run(kind)
                results[result]["outputs"] = references[key].outputs
    torch.save(results, path)
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
