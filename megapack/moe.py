"""Mixtures of experts on packed rows: the router, and what the adapter does with all of them.

Megatron's router takes a micro-batch for one sequence: its statistics and auxiliary losses would
depend on what is packed together. `PackedRouter` reads the samples from the row that is being run,
and takes the place of `TopKRouter` in `MoESubmodules.router`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megapack.errors import DataError, ScheduleError
from megapack.head import unwrapped
from megapack.layout import Layout
from megapack.routing import (
    RoutingPass,
    RoutingRow,
    RoutingShape,
    balance_loss,
    routing_row,
    z_loss,
)
from megapack.thd import PackedRow

TopK = Callable[..., tuple[Tensor, Tensor]]


class PackedRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's top-k router for packed rows, with per-sample losses and routing replay.

    Outside of the adapter's runs it is `TopKRouter`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pass: RoutingPass | None = None
        self._row: RoutingRow | None = None
        self._checkpointed: deque[RoutingRow | None] = deque()
        self._replay: Any = self.router_replay
        self._moe_layers = moe_layers(self.config)

    def follow(self, routing: RoutingPass | None) -> None:
        """Take rows from this pass; None ends it."""
        self._pass, self._row = routing, None
        self._checkpointed.clear()
        self.router_replay = self._replay if routing is None else _Choice(self)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and map [tokens, experts] of hidden states; see `TopKRouter`."""
        if self._pass is None:
            return super().forward(input, padding_mask)  # type: ignore[no-any-return]
        self._row = self._next_row()
        return super().forward(input)  # type: ignore[no-any-return]

    def _next_row(self) -> RoutingRow | None:
        """The row of this call, which under recomputation comes a second time, in the backward.

        A checkpointed forward runs without gradients, its recomputation with them; micro-batches
        go backward through a chunk in the order in which they went forward.
        """
        assert self._pass is not None
        if self.training and not torch.is_grad_enabled():
            self._checkpointed.append(self._pass.row)
        elif self._checkpointed:
            return self._checkpointed.popleft()
        return self._pass.row

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach both auxiliary losses to the logits, before experts are chosen from them."""
        if self._row is None:
            return super().apply_z_loss(logits, padding_mask)  # type: ignore[no-any-return]
        if not (self.training and torch.is_grad_enabled()):
            return logits
        assert self._pass is not None
        for name, coefficient, loss_sum in self._losses(logits, self._row):
            loss = loss_sum * self._pass.token_weight
            self._pass.add(name, loss)
            logits = MoEAuxLossAutoScaler.apply(logits, coefficient * loss)
        return logits

    def _losses(self, logits_tE: Tensor, row: RoutingRow) -> Iterator[tuple[str, float, Tensor]]:
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient:
            chosen_tE, scores_tE = compute_routing_scores_for_aux_loss(
                logits_tE, self.topk, self.score_function, fused=self.config.moe_router_fusion
            )
            loss = balance_loss(scores_tE, chosen_tE, row, self.topk, self.tp_cp_group)
            yield "moe_balance_loss", coefficient, loss
        if self.config.moe_z_loss_coeff:
            yield "moe_z_loss", self.config.moe_z_loss_coeff, z_loss(logits_tE, row)

    def is_aux_loss_enabled(self) -> bool:
        """Whether Megatron adds its own losses: not in a run, where ours stand in their place."""
        return self._row is None and super().is_aux_loss_enabled()

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the choices of real tokens for the expert bias."""
        if self._row is None:
            super()._apply_expert_bias(routing_map, padding_mask)
        elif self.enable_expert_bias and torch.is_grad_enabled():
            self.local_tokens_per_expert += routing_map[self._row.real_t].sum(0).detach()

    def choose(self, scores: Tensor, own_choice: Callable[[], tuple[Tensor, Tensor]]) -> Any:
        """The row's choices where it has some, else the router's own; (scores, experts) [t, K]."""
        row, layer = self._row, self.layer_number - 1
        if row is None or self._pass is None or layer not in self._moe_layers:
            return own_choice()
        layer = self._moe_layers.index(layer)
        if row.choices_tLK is None:
            chosen_tK, experts_tK = own_choice()
        else:
            experts_tK = row.choices_tLK[:, layer].long()
            chosen_tK = scores.gather(1, experts_tK)
        if self._pass.record:
            row.recorded[layer] = experts_tK.detach()
        return chosen_tK, experts_tK


class _Choice:
    """Stands in for Megatron's RouterReplay, which holds one micro-batch at a time."""

    def __init__(self, router: PackedRouter) -> None:
        self._router = router

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `PackedRouter.choose`."""
        assert default_compute_topk is not None
        return self._router.choose(  # type: ignore[no-any-return]
            scores, lambda: default_compute_topk(scores, topk, num_groups, group_topk)
        )


def moe_layers(config: Any) -> list[int]:
    """Which layers of the whole model, counted from 0, have experts."""
    if not config.num_moe_experts:
        return []
    every = config.moe_layer_freq
    if isinstance(every, int):
        return list(range(0, config.num_layers, every))
    return [layer for layer, has_experts in enumerate(every) if has_experts]


class ModelRouting:
    """All routers of this rank's chunks.

    Args:
        tp_rank: the sequence-parallel slice that this rank's routers see.
    """

    def __init__(self, chunks: Sequence[Any], config: Any, layout: Layout, tp_rank: int) -> None:
        self._config, self._layout, self._tp_rank = config, layout, tp_rank
        modules = [module for chunk in chunks for module in unwrapped(chunk).modules()]
        self._routers = [module for module in modules if isinstance(module, PackedRouter)]
        self._stock = any(type(module) is TopKRouter for module in modules)
        self.shape = RoutingShape(
            num_layers=len(moe_layers(config)),
            num_experts=config.num_moe_experts or 0,
            top_k=config.moe_router_topk,
        )
        self._check_routers()

    def _check_routers(self) -> None:
        config = self._config
        asks = has_balance_loss(config) or config.moe_z_loss_coeff
        if self._stock and (asks or config.moe_router_enable_expert_bias):
            raise ScheduleError(
                "with Megatron's TopKRouter auxiliary losses and the expert bias count padding "
                "and depend on the packing; set router=megapack.moe.PackedRouter in the layer "
                "spec's MoESubmodules"
            )

    def rows(
        self, rows: Sequence[PackedRow], choices: Sequence[Tensor | None] | None, record: bool
    ) -> list[RoutingRow | None]:
        """The packed rows as routers see them; None each where the model has no experts.

        Raises:
            DataError: choices for a model without experts, or that do not fit it.
            ScheduleError: routers that cannot record or replay.
        """
        if choices is not None or record:
            self._check_replay()
        if not self.shape.num_layers:
            return [None] * len(rows)
        positions = (self._positions(row) for row in rows)
        return [
            routing_row(row, at, choices, self.shape)
            for row, at in zip(rows, positions, strict=True)
        ]

    def _check_replay(self) -> None:
        if not self.shape.num_layers:
            raise DataError("the model has no experts, so it has no routing to record or replay")
        if self._stock or self._config.moe_router_fusion:
            raise ScheduleError(
                "routing is recorded and replayed by megapack.moe.PackedRouter without "
                f"moe_router_fusion (it is {self._config.moe_router_fusion}); set it to False and "
                "router=PackedRouter in the layer spec's MoESubmodules"
            )

    def _positions(self, row: PackedRow) -> Tensor:
        """Where the tokens of this rank's routers stand in the whole row."""
        if not self._layout.sequence_parallel:
            return row.row_positions_T
        return row.row_positions_T.chunk(self._layout.tp)[self._tp_rank]

    @contextlib.contextmanager
    def following(self, routing: RoutingPass) -> Iterator[None]:
        """Within the block the routers take their rows from this pass."""
        for router in self._routers:
            router.follow(routing)
        try:
            yield
        finally:
            for router in self._routers:
                router.follow(None)

    def metrics(self, routing: RoutingPass, device: torch.device) -> dict[str, float]:
        """The pass's auxiliary losses without coefficients, mean over layers. A collective.

        Each rank holds other tokens or other layers: tensor-parallel ranks too, for experts under
        tensor parallelism train with sequence parallelism only.
        """
        names = ["moe_balance_loss"] if has_balance_loss(self._config) else []
        names += ["moe_z_loss"] if self._config.moe_z_loss_coeff else []
        if not names or not self.shape.num_layers:
            return {}
        zero = torch.zeros((), dtype=torch.float64, device=device)
        sums = torch.stack([routing.sums.get(name, zero) for name in names])
        dist.all_reduce(sums)
        return dict(zip(names, (sums / self.shape.num_layers).tolist(), strict=True))


def has_balance_loss(config: Any) -> bool:
    """Whether some load-balancing loss has a weight."""
    coefficients = config.moe_aux_loss_coeff
    return any(coefficients) if isinstance(coefficients, list) else bool(coefficients)


def check_experts(config: Any, layout: Layout) -> None:
    """Raise ScheduleError naming the first MoE setting that makes the gradient depend on packing.

    Called for models with experts, before any collective.
    """
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if not isinstance(kinds, list):
        kinds, coefficients = [kinds], [coefficients]
    for kind, coefficient in zip(kinds, coefficients, strict=True):
        if coefficient and kind != "seq_aux_loss":
            raise ScheduleError(
                f"moe_router_load_balancing_type={kind!r} with moe_aux_loss_coeff={coefficient} "
                "balances what happens to be packed together, so the gradient would depend on the "
                "packing; set 'seq_aux_loss' (each sample by itself), or the coefficient to 0"
            )
    unsupported = {
        "moe_expert_capacity_factor": "which tokens are dropped would depend on the packing; set "
        "it to None",
        "moe_enable_routing_replay": "it holds one micro-batch at a time; set it to False and use "
        "forward(record_routing=True) and step(routing=...)",
    }
    for name, advice in unsupported.items():
        if getattr(config, name, None):
            raise ScheduleError(f"config.{name}={getattr(config, name)} is not supported: {advice}")
    if "sinkhorn" in kinds:
        raise ScheduleError(
            "moe_router_load_balancing_type='sinkhorn' routes a token by what is packed with it; "
            "set 'seq_aux_loss' or 'none'"
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        raise ScheduleError(
            f"experts with tp={layout.tp} train with sequence parallelism only; set "
            "Layout(sequence_parallel=True) and config.sequence_parallel=True"
        )
