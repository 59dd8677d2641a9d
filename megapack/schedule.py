"""The adapter around Megatron's `forward_backward_func`: one planned step at a time.

    plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=16384)
    adapter = ScheduleAdapter(model_chunks, layout=layout)
    result = adapter.step(plan, batch, objective=PPO())       # gradients are in the model now

The optimizer is yours. `forward` runs the same rows without gradients and returns per-token
log-probs in sample order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from megapack import settings
from megapack.consensus import agree, on_any_rank
from megapack.cp_slices import slice_row
from megapack.errors import DataError, ScheduleError
from megapack.experts import ModelRouting
from megapack.forward import DeviceRow, ForwardStep, LastStage, RowForward, taken_inputs
from megapack.frozen import keep_gradients_through_recompute
from megapack.layout import Layout
from megapack.loss import LossWeighting, sample_weights
from megapack.mtp import loss_coefs, loss_names, num_depths, with_rows_ahead
from megapack.objectives import AnyObjective, metric_names
from megapack.outputs import Scope, scatter_to_samples, sum_metrics
from megapack.p2p import PlannedP2PCommunicator
from megapack.plan import Plan, StepPlan, check_plan
from megapack.routing import RoutingPass, RoutingRow, collect_routing, token_weight
from megapack.run_context import config_for, evaluating, process_groups
from megapack.samples import SampleBatch
from megapack.thd import PackedRow, pack_row

T = TypeVar("T")
Rows = tuple[list[PackedRow], list[RoutingRow | None]]
"""The packed rows of a step on this rank, and how routers see each."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a training step found, the same on every rank."""

    loss: float
    """Sum of weight * loss over every token of the step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The objective's metrics, weighted like the loss."""


class ScheduleAdapter:
    """Runs planned steps of a Megatron-Core model. Made on all ranks together: a collective.

    Args:
        model: the chunks of this rank, one per virtual stage, wrapped in DDP or not.
        layout: the one that the plans are made for; checked against Megatron's groups.
        logprob_chunk_tokens: positions whose logits exist at one time.
        temperature: logits are divided by it.
        head: "value" where the last chunk has a value head (`value_head.replace_output_layer`).

    Raises:
        ScheduleError: a setting that Megatron would hang or train wrongly with, and what to set.
    """

    communicator_class = PlannedP2PCommunicator
    """What carries planned rows between stages; a subclass may set one of its own."""

    def __init__(
        self,
        model: Sequence[torch.nn.Module] | torch.nn.Module,
        *,
        layout: Layout,
        logprob_chunk_tokens: int = 1024,
        temperature: float = 1.0,
        head: settings.Head = "vocabulary",
    ) -> None:
        self.chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        self.layout, self.head = layout, head
        self.config = get_model_config(self.chunks[0])
        self.around_forward: Callable[[ForwardStep], ForwardStep] | None = None
        """Wraps what runs a row through a chunk, as `trace.StepTracer` does."""
        self._device = torch.device(torch.cuda.current_device())
        # Stages differ in their layers: what one refuses, all do.
        self._routing = agree(self._checked, device=self._device)
        keep_gradients_through_recompute(self.chunks, self.config)
        self._groups = process_groups()
        self._dp_group = parallel_state.get_data_parallel_group()
        self._head_options = {
            "tp_group": self._groups.tp,
            "cp_group": self._groups.cp,
            "sequence_parallel": layout.sequence_parallel,
            "chunk_tokens": logprob_chunk_tokens,
            "temperature": temperature,
            "mtp_coefs": loss_coefs(self.config),
        }
        self._checked_digest = ""
        # Agreed on already: no tensors need no word with the others.
        self._checked_inputs: set[tuple[str, ...]] = {()}

    def _checked(self) -> ModelRouting:
        settings.check_layout(self.layout, len(self.chunks))
        settings.check_config(self.config, self.layout)
        settings.check_chunks(self.chunks)
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        return ModelRouting(self.chunks, self.config, self.layout, tp_rank)

    @property
    def dp_rank(self) -> int:
        """This process's data-parallel rank: which of the plan's ranks it runs."""
        return int(self._dp_group.rank())

    def step(
        self,
        plan: Plan,
        batch: SampleBatch,
        *,
        objective: AnyObjective,
        step: int = 0,
        weighting: LossWeighting = "token-mean",
        norm_constant: float | None = None,
        entropy: bool = False,
        routing: Sequence[Tensor | None] | None = None,
    ) -> StepResult:
        """Forward and backward of one step; gradients are added to the model's.

        A collective: every rank calls it with the same plan, step, objective and weighting.

        Args:
            plan: made for this layout and the lengths of `batch`.
            batch: the samples that the plan counts.
            objective: per-token losses; its required fields must be in the batch.
            step: which of the plan's steps.
            weighting, norm_constant: see `loss.sample_weights`.
            entropy: report the entropy even where the objective does not read it.
            routing: experts to take, per sample [tokens, MoE layers, experts per token] of the
                samples of this data-parallel rank, as `forward(record_routing=True)` gives them;
                None lets the routers choose. Probabilities are those of the current logits.

        Raises:
            ScheduleError: on every rank, where plans differ or one rank's work failed.
        """

        with_entropy, names = entropy or objective.needs_entropy, list[str]()

        def pack() -> Rows:
            settings.check_objective(objective, self.head)
            settings.check_entropy(with_entropy, self.head)
            missing = [n for n in objective.required_fields if n not in batch.field_names]
            names.extend([*metric_names(objective, with_entropy), *loss_names(self.config)])
            if missing:
                raise DataError(
                    f"{type(objective).__name__} reads {missing}; add them to the batch"
                )
            if hasattr(objective, "check"):
                objective.check(batch, plan, step)
            weights = sample_weights(weighting, batch.num_loss_tokens, plan, step, norm_constant)
            rows = self._pack(
                plan,
                batch,
                step,
                weights.tolist(),
                objective.required_fields,
                num_depths(self.config),
            )
            return rows, self._routing.rows(rows, routing, record=False)

        settings.check_reduction(self.config, self.chunks, self.layout)
        call = (
            f"train {weighting} {norm_constant} {entropy} {routing is None} {_described(objective)}"
        )
        rows = self._agree(plan, batch, step, call, pack)
        last = LastStage(objective, with_entropy=with_entropy, **self._head_options)
        routers = RoutingPass(token_weight=token_weight(plan.steps[step]))
        self._run(plan, step, rows, last, routers, forward_only=False)
        sums = sum_metrics(
            last.sums,
            names,
            dp_cp_group=self._groups.dp_cp,
            pp_group=self._groups.pp,
            device=self._device,
        )
        sums |= self._routing.metrics(routers, self._device)
        return StepResult(loss=sums.pop("loss"), metrics=sums)

    def forward(
        self,
        plan: Plan,
        batch: SampleBatch,
        *,
        step: int = 0,
        entropy: bool = False,
        scope: Scope = "all",
        routing: Sequence[Tensor | None] | None = None,
        record_routing: bool = False,
    ) -> dict[str, list[Tensor | None]]:
        """Log-probs (or values) of one step's responses without gradients, in sample order.

        A collective, like `step`; the model is in evaluation mode meanwhile.

        Args:
            entropy: compute the entropy of each next-token distribution too.
            scope: see `outputs.scatter_to_samples`.
            routing: see `step`.
            record_routing: return the experts that were taken, too.

        Returns:
            "logprobs" (and "entropy"), from a value head "values": per sample of the batch one fp32
            value per token on the CPU, 0 outside the response; None for samples that the step or
            the scope leaves out. From a value head also "scores": one number per sample, [1].
            "routing": see `routing.collect_routing`.
        """

        def pack() -> Rows:
            settings.check_entropy(entropy, self.head)
            rows = self._pack(plan, batch, step, None, ())
            return rows, self._routing.rows(rows, routing, record_routing)

        call = f"forward {entropy} {scope} {routing is None} {record_routing}"
        rows = self._agree(plan, batch, step, call, pack)
        last = LastStage(None, with_entropy=entropy, **self._head_options)
        names = ("logprobs", "entropy") if entropy else ("logprobs",)
        if self.head == "value":
            names = ("values", "scores")
        with torch.no_grad(), evaluating(self.chunks):
            routers = RoutingPass(record=record_routing)
            self._run(plan, step, rows, last, routers, forward_only=True)
        outputs = {
            name: scatter_to_samples(
                last.outputs[name],
                [1] * len(batch) if name == "scores" else batch.lengths,
                plan.steps[step],
                dp_rank=self.dp_rank,
                dp_cp_group=self._groups.dp_cp,
                cp_group=self._groups.cp,
                pp_group=self._groups.pp,
                scope=scope,
                device=self._device,
            )
            for name in names
        }
        if record_routing:
            outputs["routing"] = self._recorded(plan, batch, step, rows, scope)
        return outputs

    def _recorded(
        self, plan: Plan, batch: SampleBatch, step: int, rows: Rows, scope: Scope
    ) -> list[Tensor | None]:
        groups = [self._groups.pp, self._groups.cp]
        groups += [self._groups.tp] if self.layout.sequence_parallel else []
        groups += [self._dp_group] if scope == "all" else []
        return collect_routing(
            [row for row in rows[1] if row is not None],
            batch.lengths,
            plan.steps[step],
            self._routing.shape,
            dp_rank=self.dp_rank,
            scope=scope,
            groups=groups,
            device=self._device,
        )

    def _agree(
        self, plan: Plan, batch: SampleBatch, step: int, call: str, pack: Callable[[], T]
    ) -> T:
        def check_and_pack() -> T:
            if plan.layout != self.layout:
                raise DataError(f"the plan is for {plan.layout}, the adapter for {self.layout}")
            settings.check_head(self.chunks, self.head)
            if plan.policy.row_shape == "planned":
                settings.check_planned_rows(self.config)
            settings.check_counts(plan, self.config)
            if plan.digest() != self._checked_digest:
                check_plan(plan, batch.lengths)
                self._checked_digest = plan.digest()
            return pack()

        same = {
            "plan": plan.digest(),
            "step": str(step),
            "call": call,
            "count of loss tokens": str(batch.num_loss_tokens),
            "tensor fields": batch.tensor_signature,
        }
        packed = agree(check_and_pack, device=self._device, same=same)
        self._check_inputs(batch.tensor_names)
        return packed

    def _check_inputs(self, names: tuple[str, ...]) -> None:
        """A tensor that no chunk of any rank takes would be left out in silence."""
        if names in self._checked_inputs:
            return
        taken = {name for chunk in self.chunks for name in taken_inputs(chunk, names)}
        found = on_any_rank([name in taken for name in names], device=self._device)
        for name, is_taken in zip(names, found, strict=True):
            if not is_taken:
                error = ScheduleError(
                    f"no model chunk's forward takes {name!r}, which the batch has as a tensor; "
                    "add the argument to the model's forward, or leave the tensor out"
                )
                error.on_all_ranks = True
                raise error
        self._checked_inputs.add(names)

    def _pack(
        self,
        plan: Plan,
        batch: SampleBatch,
        step: int,
        weights: Sequence[float] | None,
        field_names: Sequence[str],
        num_depths: int = 0,
    ) -> list[PackedRow]:
        cp, ids = self._groups.cp, plan.colocate_ids
        rows = (
            pack_row(batch, micro_batch, plan.layout, weights, field_names, ids)
            for micro_batch in plan.steps[step].ranks[self.dp_rank]
        )
        return [slice_row(with_rows_ahead(row, num_depths), cp.size(), cp.rank()) for row in rows]

    def _run(
        self,
        plan: Plan,
        step_index: int,
        packed: Rows,
        last_stage: LastStage,
        routers: RoutingPass,
        *,
        forward_only: bool,
    ) -> None:
        layout, step = self.layout, plan.steps[step_index]
        planned = plan.policy.row_shape == "planned"
        rows, routing = packed
        device_rows = [
            DeviceRow(row, self._device, seen) for row, seen in zip(rows, routing, strict=True)
        ]
        communicator = None
        if planned and layout.pp > 1:
            communicator = self._communicator(rows, step, forward_only)
        forward: ForwardStep = RowForward(last_stage, routers)
        if self.around_forward is not None:
            forward = self.around_forward(forward)
        run = get_forward_backward_func()
        overrides = self._overrides(step, planned)
        with config_for(self.config, overrides), self._routing.following(routers):
            run(
                forward_step_func=forward,
                data_iterator=[iter(device_rows) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(rows),
                seq_length=rows[0].row_tokens,
                micro_batch_size=1,
                forward_only=forward_only,
                p2p_communicator=communicator,
                pg_collection=None if communicator is None else self._groups,
            )
        assert communicator is None or communicator.num_pending == 0, "a planned receive is missing"

    def _communicator(
        self, rows: list[PackedRow], step: StepPlan, forward_only: bool
    ) -> PlannedP2PCommunicator:
        layout = self.layout
        shards = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        return self.communicator_class(
            self._groups.pp,
            self.config,
            row_lengths=[row.row_tokens // shards for row in rows],
            vpp=layout.vpp,
            group_size=step.group_size,
            forward_only=forward_only,
        )

    def _overrides(self, step: StepPlan, planned: bool) -> dict[str, Any]:
        overrides: dict[str, Any] = {"variable_seq_lengths": planned and self.layout.pp > 1}
        if self.layout.vpp > 1:
            overrides["microbatch_group_size_per_vp_stage"] = step.group_size
            # Megatron-Core before 0.19 frees a stage's output while its isend still reads it.
            overrides["deallocate_pipeline_outputs"] = False
        if self.config.finalize_model_grads_func is None and settings.reduces(self.chunks):
            overrides["finalize_model_grads_func"] = finalize_model_grads
        return overrides


def _described(objective: AnyObjective) -> str:
    """The same text on every rank: addresses in it differ between processes."""
    return f"{type(objective).__module__}.{re.sub(r' at 0x[0-9a-f]+', '', repr(objective))}"
