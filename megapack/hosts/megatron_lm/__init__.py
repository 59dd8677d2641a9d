"""Megatron-LM's recipes: planned steps inside `pretrain`, and its packing scheduler.

    patching.apply("megatron_lm")          # above every import of megatron.training
    forward_step = megatron_lm.PlannedStep(max_tokens_per_gpu=16384)
    pretrain(..., forward_step_func=forward_step)

`pretrain` passes `num_microbatches`, a number of micro-batches of constant shape. A planned step
reads it as the number of data set items that each data-parallel rank draws, so consumed samples and
learning rates stay right; M, iterators and row lengths are the plan's. Any other forward step runs
unchanged.

Modules:
    data: samples of Megatron-LM's data sets
    model: its attention and routers on packed rows
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import megapack
from megapack.errors import ConfigError, ScheduleError
from megapack.hosts.shared.rank_rows import for_step
from megapack.layout import Layout, config_rows
from megapack.policy import Policy
from megapack.prefixes import SharedPrefixes

if TYPE_CHECKING:
    from megapack.cost.model import CostModel
    from megapack.hosts.megatron_lm.model import AuxLoss
from megapack.plan.plan import Plan

logger = logging.getLogger(__name__)


class PlannedStep:
    """A `forward_step_func` for Megatron-LM that plans, packs and runs each step.

    Args:
        max_tokens_per_gpu: see `build_dp_schedule`.
        objective: per-token losses; None for `SFT()`. Its fields are keys of the items.
        weighting: weights of tokens, see `loss.sample_weights`.
        norm_constant: see `loss.sample_weights`; only seq-mean-token-sum-norm uses it.
        cost: see `build_dp_schedule`.
        policy: see `build_dp_schedule`; with split samples or split backwards, the steps run as
            lists of operations. Under share_prefixes="auto", rows hold the tokens that samples have
            in common at their beginnings once, if the model can: dropout must be 0.
        aux_loss: "per_sequence" balances the experts' load over each sample (`seq_aux_loss`) where
            the recipe sets `aux_loss` or `global_aux_loss`, which balance the tokens that are
            packed together; "as_set" refuses these.
    """

    # The patch, what is imported after it, and what a host passes to its schedule that planned
    # steps do not support, with what to do.
    _patch = ("megatron_lm", "megatron.training")
    _refused: tuple[str, ...] = (
        *("adjust_tensor_shapes_fn", "collect_non_loss_data", "force_all_reduce"),
        *("p2p_communicator", "pg_collection"),
    )
    _refusal = (
        "Megatron-LM passes {}, which planned steps do not support; turn off the feature that "
        "needs it (distillation, saved gradients, multi-module models), or the patch"
    )

    def __init__(
        self,
        *,
        max_tokens_per_gpu: int,
        objective: Any = None,
        weighting: Any = "token-mean",
        norm_constant: float | None = None,
        cost: CostModel | None = None,
        policy: Policy | None = None,
        aux_loss: AuxLoss = "as_set",
    ) -> None:
        if aux_loss not in ("as_set", "per_sequence"):
            raise ConfigError(f"aux_loss={aux_loss!r}; set 'as_set' or 'per_sequence'")
        self._budget = max_tokens_per_gpu
        self._aux_loss: AuxLoss = aux_loss
        self._cost = cost
        self._policy = policy or Policy()
        self._shares_prefixes = False
        self._objective = objective
        self._weighting = {"weighting": weighting, "norm_constant": norm_constant}
        self._adapter: Any = None
        self._num_steps = 0

    def __call__(self, data_iterator: Any, model: Any, *_: Any, **__: Any) -> Any:
        """Raise: only Megatron's own schedule calls this, and only if the patch is not applied."""
        host, package = self._patch
        raise ScheduleError(
            "a PlannedStep runs under the patched get_forward_backward_func only; call "
            f'megapack.hosts.patching.apply("{host}") above the import of {package}'
        )

    def check_call(self, step: Mapping[str, Any]) -> None:
        """Raise ConfigError if the recipe passes its schedule what planned steps do not support."""
        for name in self._refused:
            if step.get(name):
                raise ConfigError(self._refusal.format(name))

    def run(
        self, data_iterator: Any, model: Any, num_items: int, forward_only: bool
    ) -> list[dict[str, Any]]:
        """Run one step on all ranks: add gradients to the model, or only compute the loss.

        Returns:
            The dict that Megatron-LM logs, of one-element tensors, the same on every rank.

        Raises:
            MegapackError: on every rank; see `ScheduleAdapter.step`.
        """
        import torch

        adapter = self._adapter_of(model)
        self._num_steps += 1
        with adapter.ranks.guarded(f"planned step {self._num_steps}"):
            metrics = self._run(adapter, data_iterator, num_items, forward_only)
        device = torch.cuda.current_device()
        return [{name: torch.tensor([x], device=device) for name, x in metrics.items()}]

    def _run(
        self, adapter: Any, data_iterator: Any, num_items: int, forward_only: bool
    ) -> dict[str, float]:
        """Draw, plan and run; returns the metrics to log."""
        import torch

        from megapack.hosts.megatron_lm.data import draw_batch
        from megapack.loss.token import SFT
        from megapack.ranks.agree import agree

        objective = SFT() if self._objective is None else self._objective
        adapter.ranks.place.enter("plan")
        batch = draw_batch(data_iterator, num_items, objective.required_fields)

        def build() -> Plan:
            return megapack.build_dp_schedule(
                batch.lengths,
                layout=adapter.layout,
                max_tokens_per_gpu=self._budget,
                cost=self._cost,
                policy=for_step(self._policy, len(batch)),
                forward_only=forward_only,
                prefixes=self._prefixes(adapter, batch),
            )

        plan = agree(build, device=torch.device(torch.cuda.current_device()))
        if forward_only:
            return {"lm loss": self._likelihood(adapter, plan, batch)}
        result = adapter.step(plan, batch, objective=objective, **self._weighting)
        name = "lm loss" if isinstance(objective, SFT) else "loss"
        return {name: result.loss, **result.metrics}

    def _prefixes(self, adapter: Any, batch: Any) -> SharedPrefixes | None:
        """What the step's samples have in common; every rank has all of them. None: not shared."""
        if not self._shares_prefixes:
            return None
        return SharedPrefixes.from_samples(
            [batch.tokens(i) for i in range(len(batch))],
            mtp_num_layers=getattr(adapter.config, "mtp_num_layers", None) or 0,
        )

    def _likelihood(self, adapter: Any, plan: Plan, batch: Any) -> float:
        """Negative log-likelihood of the loss tokens, weighted like the loss."""
        from megapack.loss.token import sample_weights

        logprobs = adapter.forward(plan, batch)["logprobs"]
        weights = sample_weights(
            num_loss_tokens=batch.num_loss_tokens, plan=plan, **self._weighting
        )
        # Log-probs are 0 outside the response, and None for samples that the step left out.
        sums = [0.0 if values is None else float(values.sum()) for values in logprobs]
        return -float(weights @ sums)

    def _can_share(self) -> bool:
        """Whether the model's stages are right on rows that share prefixes. A collective."""
        import torch

        from megapack.ranks.agree import on_any_rank
        from megapack.schedule.row_rules import Feature, check_rows

        adapter = self._adapter
        features: list[Feature] = ["prefixes"]
        features += ["wide"] if self._policy.context_parallel == "dynamic" else []
        refused = False
        try:
            check_rows(adapter.chunks, adapter.config, features, is_training=True)
        except ConfigError as error:
            logger.info("rows share no prefixes: %s", error)
            refused = True
        device = torch.device(torch.cuda.current_device())
        return not on_any_rank([refused], device=device)[0]

    def _adapter_of(self, model: Any) -> Any:
        from megapack.hosts.megatron_lm.model import use_packed_parts
        from megapack.schedule.adapter import ScheduleAdapter

        chunks = list(model) if isinstance(model, Sequence) else [model]
        if self._adapter is None or self._adapter.chunks != chunks:
            layout = megatron_layout(chunks[0])
            logger.info("planned steps on %s, %d tokens per GPU", layout, self._budget)
            use_packed_parts(chunks, self._aux_loss)
            self._adapter = ScheduleAdapter(chunks, layout=layout)
            self._shares_prefixes = self._policy.share_prefixes == "auto" and self._can_share()
        return self._adapter


def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Megatron-Core's schedule function, which runs a `PlannedStep` as a planned step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func as megatron_func

    schedule = megatron_func(*args, **kwargs)

    @functools.wraps(schedule)
    def forward_backward_func(*, forward_step_func: Any, **step: Any) -> Any:
        if not isinstance(forward_step_func, PlannedStep):
            return schedule(forward_step_func=forward_step_func, **step)
        forward_step_func.check_call(step)
        return forward_step_func.run(
            step["data_iterator"],
            step["model"],
            step["num_microbatches"],
            step.get("forward_only", False),
        )

    return forward_backward_func


def megatron_layout(chunk: Any) -> Layout:
    """The layout of Megatron's process groups and the model's config."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    from megapack.schedule.checks import group_sizes

    config = get_model_config(chunk)
    vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return Layout(
        **group_sizes(has_experts=bool(config.num_moe_experts)),
        vpp=vpp,
        sequence_parallel=bool(config.sequence_parallel),
        microbatch_group_size=config.microbatch_group_size_per_vp_stage if vpp > 1 else None,
        fp8=config_rows(config),
    )


def get_groups_and_subsamples(
    self: Any, sample_id_seqlens: Sequence[tuple[int, int]]
) -> list[list[list[int]]]:
    """Pack samples: M is a multiple of G, and no micro-batch is empty or over the budget.

    Megatron's own function packs in input order, and fails at an assertion if it cannot fill the
    last G micro-batches.

    Args:
        self: Megatron's scheduler.
        sample_id_seqlens: (id, padded tokens) of each sample.

    Returns:
        Ids as `[micro-batch][rank][position]`. Ranks are DP x CP ranks; the CP ranks of one DP rank
        have the same ids.

    Raises:
        PlanError: too few samples for one per rank and micro-batch.
    """
    group = self.microbatch_group_size_per_vp_stage or 1
    # The scheduler does not know pp. With pp = G the legal counts are the multiples of G.
    vpp = 2 if group > 1 else 1
    plan = megapack.build_dp_schedule(
        [int(tokens) for _, tokens in sample_id_seqlens],
        layout=Layout(dp=self.dp_size, cp=self.cp_size, pp=group, vpp=vpp),
        max_tokens_per_gpu=int(self.max_seqlen_per_dp_cp_rank),
        policy=Policy(unreachable="error"),
    )
    return [
        [
            [sample_id_seqlens[i][0] for i in micro_batch.samples]
            for micro_batch in micro_batches
            for _ in range(self.cp_size)
        ]
        for micro_batches in zip(*plan.steps[0].ranks, strict=True)
    ]
