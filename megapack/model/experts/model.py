"""All routers of a rank's chunks: their checks, rows and metrics; and the losses of indexers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from torch import Tensor

from megapack.errors import ConfigError, DataError
from megapack.layout import Layout
from megapack.model.attention.sparse import SparseAttention
from megapack.model.experts.router import PackedRouter, moe_layers
from megapack.model.experts.rows import RoutingShape, routing_row
from megapack.model.head import layer_letters, unwrapped
from megapack.model.mtp import num_depths
from megapack.model.settings import refuse_set
from megapack.rows.packed import PackedRow
from megapack.rows.schedule_pass import SchedulePass


class ModelRouting:
    """All routers of this rank's chunks.

    Args:
        tp_rank: index of the sequence-parallel slice that this rank's routers see.
    """

    def __init__(self, chunks: Sequence[Any], config: Any, layout: Layout, tp_rank: int) -> None:
        self._config = config
        self._layout = layout
        self._tp_rank = tp_rank
        modules = [module for chunk in chunks for module in unwrapped(chunk).modules()]
        self._routers = [module for module in modules if isinstance(module, PackedRouter)]
        self._sparse = [module for module in modules if isinstance(module, SparseAttention)]
        self._has_stock_router = any(type(module) is TopKRouter for module in modules)
        for module in modules:
            if isinstance(module, MultiTokenPredictionBlock):
                _mark_ahead(module)
        self._letters = layer_letters(chunks[0])
        self._layers = moe_layers(config)
        if self._letters is not None:
            # Megatron's config need not say which layers of a HybridModel have experts.
            self._layers = [i for i, letter in enumerate(self._letters[0]) if letter == "E"]
        for router in self._routers:
            router.moe_layers = self._layers
        self.shape = RoutingShape(
            num_layers=len(self._layers),
            num_experts=config.num_moe_experts or 0,
            top_k=config.moe_router_topk,
        )
        self._check_routers()

    def _check_routers(self) -> None:
        config = self._config
        has_losses = has_balance_loss(config) or config.moe_z_loss_coeff
        if self._has_stock_router and (has_losses or config.moe_router_enable_expert_bias):
            raise ConfigError(
                "with Megatron's TopKRouter auxiliary losses and the expert bias count padding "
                "and depend on the packing; set "
                "router=megapack.model.experts.router.PackedRouter in the layer "
                "spec's MoESubmodules"
            )

    def with_routing(
        self, rows: list[PackedRow], choices: Sequence[Tensor | None] | None, record: bool
    ) -> list[PackedRow]:
        """The rows with their routing; unchanged if the model has no experts.

        Args:
            rows: this context-parallel rank's slices.
            choices: see `routing_row`.
            record: whether the pass records choices.

        Raises:
            DataError: the model has no experts, or the choices do not fit it.
            ConfigError: the routers cannot record or replay.
        """
        if choices is not None or record:
            self._check_replay()
        if not self.shape.num_layers:
            return rows
        return [
            dataclasses.replace(row, routing=routing_row(row, self._part(row), choices, self.shape))
            for row in rows
        ]

    def _check_replay(self) -> None:
        if not self.shape.num_layers:
            raise DataError("the model has no experts, so it has no routing to record or replay")
        if self._has_stock_router or self._config.moe_router_fusion:
            raise ConfigError(
                "routing is recorded and replayed by "
                "megapack.model.experts.router.PackedRouter without "
                f"moe_router_fusion (it is {self._config.moe_router_fusion}); set it to False and "
                "router=PackedRouter in the layer spec's MoESubmodules"
            )

    def _part(self, row: PackedRow) -> Tensor:
        """The positions of the row that this rank's routers see."""
        positions_T = torch.arange(row.tokens_T.numel())
        if not self._layout.sequence_parallel:
            return positions_T
        return positions_T.chunk(self._layout.tp)[self._tp_rank]

    @contextlib.contextmanager
    def following(self, schedule_pass: SchedulePass) -> Iterator[None]:
        """Within the block, all routers read their rows from this pass, and add their losses and
        those of indexers to it."""
        followers: list[Any] = [*self._routers, *self._sparse]
        for follower in followers:
            follower.follow(schedule_pass)
        try:
            yield
        finally:
            for follower in followers:
                follower.follow(None)

    def metrics(self, schedule_pass: SchedulePass, device: torch.device) -> dict[str, float]:
        """The pass's auxiliary losses without coefficients, mean over layers. Collective.

        The sum goes over all ranks, since each has different tokens or layers. This includes
        tensor-parallel ranks, because experts under tensor parallelism need sequence parallelism,
        and one of them adds the losses of indexers.
        """
        num_layers = self._num_loss_layers()
        if not num_layers:
            return {}
        zero = torch.zeros((), dtype=torch.float64, device=device)
        sums = torch.stack([schedule_pass.router_sums.get(name, zero) for name in num_layers])
        dist.all_reduce(sums)
        return {
            name: total / layers
            for (name, layers), total in zip(num_layers.items(), sums.tolist(), strict=True)
        }

    def _num_loss_layers(self) -> dict[str, int]:
        """The auxiliary losses, each with the number of layers that have it."""
        config = self._config
        losses: dict[str, int] = {}
        if self.shape.num_layers:
            layers = self.shape.num_layers + self._num_mtp_layers()
            losses |= {"moe_balance_loss": layers} if has_balance_loss(config) else {}
            losses |= {"moe_z_loss": layers} if config.moe_z_loss_coeff else {}
        if config.dsa_indexer_topk and config.dsa_indexer_loss_coeff:
            letters = self._letters[0] if self._letters else "*" * config.num_layers
            losses["indexer_loss"] = sum(map(letters.count, "*+D"))
        return losses

    def _num_mtp_layers(self) -> int:
        """Layers of multi-token prediction that have experts."""
        if self._letters is not None:
            per_depth = self._letters[1].count("E")
        else:
            # They are built like the last layer.
            per_depth = int(self._config.num_layers - 1 in self._layers)
        return num_depths(self._config) * per_depth


def _mark_ahead(block: Any) -> None:
    """Mark the routers of multi-token prediction, which have numbers of the model's layers."""
    for module in block.modules():
        if isinstance(module, PackedRouter):
            module.is_mtp_layer = True


def has_balance_loss(config: Any) -> bool:
    """Whether a load-balancing loss has a nonzero coefficient."""
    coefficients = config.moe_aux_loss_coeff
    return any(coefficients) if isinstance(coefficients, list) else bool(coefficients)


def check_experts(config: Any, layout: Layout) -> None:
    """Raise ConfigError for the first MoE setting that makes the gradient depend on packing.

    Called for models with experts, before any collective.
    """
    kinds = config.moe_router_load_balancing_type
    coefficients = config.moe_aux_loss_coeff
    if not isinstance(kinds, list):
        kinds = [kinds]
        coefficients = [coefficients]
    for kind, coefficient in zip(kinds, coefficients, strict=True):
        if coefficient and kind != "seq_aux_loss":
            raise ConfigError(
                f"moe_router_load_balancing_type={kind!r} with moe_aux_loss_coeff={coefficient} "
                "balances all tokens that are packed together, so the gradient would depend on the "
                "packing; set 'seq_aux_loss' (each sample by itself), or the coefficient to 0"
            )
    unsupported = {
        "moe_expert_capacity_factor": "which tokens are dropped would depend on the packing; set "
        "it to None",
        "moe_expert_rank_capacity_factor": "which tokens are dropped would depend on the packing; "
        "set it to None",
        "moe_enable_routing_replay": "it holds one micro-batch at a time; set it to False and use "
        "forward(record_routing=True) and step(routing=...)",
    }
    if getattr(config, "moe_latent_size", None):
        unsupported["moe_shared_expert_overlap"] = (
            "Megatron-Core does not train it with moe_latent_size; set it to False"
        )
    refuse_set(config, unsupported)
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind in kinds:
            raise ConfigError(
                f"moe_router_load_balancing_type={kind!r} routes a token depending on its row; "
                "set 'seq_aux_loss' or 'none'"
            )
    if layout.tp > 1 and not layout.sequence_parallel:
        raise ConfigError(
            f"experts with tp={layout.tp} need sequence parallelism; set "
            "Layout(sequence_parallel=True) and config.sequence_parallel=True"
        )
    if config.expert_tensor_parallel_size != layout.etp:
        raise ConfigError(
            f"config.expert_tensor_parallel_size={config.expert_tensor_parallel_size} and the "
            f"layout's etp={layout.etp} differ; set both to the same value"
        )
