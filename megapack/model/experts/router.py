"""The router of a mixture of experts on packed rows.

Megatron's router treats a micro-batch as one sequence, so its statistics and auxiliary losses would
depend on the packing. `PackedRouter` knows the samples of the current row. It replaces `TopKRouter`
in `MoESubmodules.router`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megapack.errors import ConfigError
from megapack.model.experts.chains import piece_balance_loss
from megapack.model.experts.recomputed import RecomputedRows
from megapack.model.experts.rows import balance_loss, z_loss
from megapack.rows.packed import RoutingRow
from megapack.rows.schedule_pass import SchedulePass

TopK = Callable[..., tuple[Tensor, Tensor]]

# Megatron-Core binds this name only if Transformer Engine imports. Its routers read it, also in
# models that are built elsewhere.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


class PackedRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's top-k router for packed rows, with per-sample losses and routing replay.

    Outside of the adapter's passes it behaves as `TopKRouter`.
    """

    group_best: int | None = None
    """Experts whose scores rank their group; None: as Megatron ranks groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._follow_no_pass()

    @classmethod
    def adopt(cls, router: TopKRouter) -> None:
        """Make a router that was built by someone else a `PackedRouter`; its weights stay."""
        router.__class__ = cls
        router._follow_no_pass()

    def _follow_no_pass(self) -> None:
        self._pass: SchedulePass | None = None
        self._row: RoutingRow | None = None
        self._recomputed = RecomputedRows()
        self._replay: Any = self.router_replay
        self.moe_layers = moe_layers(self.config)
        self._biases_softmax = self.enable_expert_bias and self.score_function == "softmax"

    def follow(self, schedule_pass: SchedulePass | None) -> None:
        """Read rows from this pass from now on; None: behave as `TopKRouter` again."""
        self._pass = schedule_pass
        self._row = None
        self._recomputed.clear()
        self.router_replay = self._replay if schedule_pass is None else self._own_replay()

    def forward(
        self, input: Tensor, padding_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, Tensor]:
        """Probabilities and map [tokens, experts] of hidden states; see `TopKRouter`.

        Args:
            others: what forks of Megatron give their routers, such as `input_ids` (radixark).
        """
        if self._pass is None:
            if self._chooses_otherwise:
                self.router_replay = self._own_replay()
            return super().forward(input, padding_mask, **others)  # type: ignore[no-any-return]
        self._row = self._next_row()
        return super().forward(input, **others)  # type: ignore[no-any-return]

    def _next_row(self) -> RoutingRow | None:
        assert self._pass is not None
        if self._pass.token_weight is None:
            return self._pass.routing
        return self._recomputed.of_call(self._pass.routing, self._pass.recomputed)  # type: ignore[no-any-return]

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach both auxiliary losses to the logits, before the experts are chosen."""
        if self._row is None:
            return super().apply_z_loss(logits, padding_mask)  # type: ignore[no-any-return]
        assert self._pass is not None
        token_weight = self._pass.token_weight
        if token_weight is None:
            return logits
        if not torch.is_grad_enabled():
            # The first forward of a checkpointed layer: later pieces of the sample come before
            # its recomputation.
            if self._row.link is not None and self.get_aux_loss_coeff("seq_aux_loss"):
                self._balance_loss(logits, self._row)
            return logits
        for name, coefficient, loss_sum in self._losses(logits, self._row):
            loss = loss_sum * token_weight
            self._pass.add_router_loss(name, loss)
            logits = MoEAuxLossAutoScaler.apply(logits, coefficient * loss)
        return logits

    def _losses(self, logits_tE: Tensor, row: RoutingRow) -> Iterator[tuple[str, float, Tensor]]:
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient:
            loss = self._balance_loss(logits_tE, row)
            yield "moe_balance_loss", coefficient, loss
        if self.config.moe_z_loss_coeff:
            yield "moe_z_loss", self.config.moe_z_loss_coeff, z_loss(logits_tE, row)

    def _balance_loss(self, logits_tE: Tensor, row: RoutingRow) -> Tensor:
        chosen_tE, scores_tE = compute_routing_scores_for_aux_loss(
            logits_tE, self.topk, self.score_function, fused=self.config.moe_router_fusion
        )
        if row.link is None:
            return balance_loss(scores_tE, chosen_tE, row, self.topk)
        return piece_balance_loss(self, scores_tE, chosen_tE, row, self.topk)

    def is_aux_loss_enabled(self) -> bool:
        """Whether Megatron adds its own losses; never within a pass, see `apply_z_loss`."""
        return self._row is None and super().is_aux_loss_enabled()

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the choices of real tokens for the expert bias, a shared one once per sample."""
        if self._row is None:
            super()._apply_expert_bias(routing_map, padding_mask)
        elif self.enable_expert_bias and torch.is_grad_enabled():
            # Not by a boolean index, whose size the host would wait for.
            counted_tE = routing_map * self._row.copies_t[:, None]
            self.local_tokens_per_expert += counted_tE.sum(0).detach()

    @property
    def _chooses_otherwise(self) -> bool:
        """Whether Megatron's choice would be another."""
        return self._biases_softmax or self.group_best is not None

    def _own_choice(
        self, scores: Tensor, top_k: int, groups: int | None, group_top_k: int | None, usual: TopK
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts [t, K] that the router chooses, also where Megatron's cannot."""
        if not self._chooses_otherwise:
            return usual(scores, top_k, groups, group_top_k)
        ranked = scores.detach()
        if self._biases_softmax:
            is_softmax = self.config.moe_router_pre_softmax
            ranked = (ranked if is_softmax else ranked.softmax(-1)) + self.expert_bias
        if self.group_best is None:
            _, experts = usual(ranked, top_k, groups, group_top_k)
        else:
            experts = experts_of_groups(ranked, top_k, groups, group_top_k, self.group_best)
        return scores.gather(1, experts), experts

    def _own_replay(self) -> Any:
        """Replaces Megatron's RouterReplay, which holds one micro-batch at a time."""
        return types.SimpleNamespace(get_replay_topk=self._choose)

    def _choose(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts [t, K]: the row's choices if it has some, else the router's own.

        Args:
            scores: [t, E]; logits if Megatron takes the softmax of the chosen ones.
            default_compute_topk: Megatron's choice.
        """
        assert default_compute_topk is not None
        given = (scores, topk, num_groups, group_topk, default_compute_topk)
        row = self._row
        layer = self._layer()
        if row is None or self._pass is None or layer is None:
            return self._own_choice(*given)
        if row.choices_tLK is None:
            chosen_tK, experts_tK = self._own_choice(*given)
        else:
            experts_tK = row.choices_tLK[:, layer].long()
            chosen_tK = scores.gather(1, experts_tK)
        if self._pass.record:
            row.recorded[layer] = experts_tK.detach()
        return chosen_tK, experts_tK

    def _layer(self) -> int | None:
        """Index among the MoE layers of the model; None for multi-token prediction.

        Megatron-Core 0.16 numbers the layers of multi-token prediction after the model's. Since
        0.19 it numbers them from 1 again, and marks their routers.
        """
        layer = self.layer_number - 1
        if getattr(self, "is_mtp_layer", False) or layer not in self.moe_layers:
            return None
        return self.moe_layers.index(layer)


def experts_of_groups(
    scores: Tensor, top_k: int, groups: int | None, group_top_k: int | None, best: int
) -> Tensor:
    """The top k of the experts in the best groups, by the sum of each group's best scores.

    >>> scores = torch.tensor([[0.4, 0.0, 0.3, 0.2]])
    >>> experts_of_groups(scores, 1, 2, 1, best=1), experts_of_groups(scores, 1, 2, 1, best=2)
    (tensor([[0]]), tensor([[2]]))
    """
    if groups is None or group_top_k is None:
        raise ConfigError(f"group_best={best} needs groups of experts; set moe_router_num_groups")
    by_group = torch.unflatten(scores, 1, (groups, -1))
    ranks = by_group.topk(best, dim=-1).values.sum(-1)
    used = ranks.topk(group_top_k, dim=-1).indices
    hidden = torch.ones_like(ranks, dtype=torch.bool).scatter(1, used, value=False)
    masked = by_group.masked_fill(hidden[..., None], -torch.inf).flatten(1)
    return masked.topk(top_k, dim=1).indices


def use_packed_router(mlp: Any, router: type[PackedRouter] = PackedRouter) -> None:
    """Put a `PackedRouter` into the spec of an MoE layer.

    Args:
        router: the class.
        mlp: `submodules.mlp` of a layer spec with experts: a ModuleSpec, or a partial of MoELayer
            since Megatron-Core 0.19.
    """
    submodules = mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]
    submodules.router = router


def moe_layers(config: Any) -> list[int]:
    """Layers of the whole model that have experts, numbered from 0."""
    if not config.num_moe_experts:
        return []
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return list(range(0, config.num_layers, frequency))
    return [layer for layer, has_experts in enumerate(frequency) if has_experts]
