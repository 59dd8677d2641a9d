"""The adapter around Megatron's `forward_backward_func`: one planned step at a time.

    plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=16384)
    adapter = ScheduleAdapter(model_chunks, layout=layout)
    result = adapter.step(plan, batch, objective=PPO())       # gradients are in the model now

The optimizer is yours. `forward` runs the same rows without gradients and returns per-token
log-probs in sample order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from megapack import settings
from megapack.consensus import Agreement, agree, on_any_rank
from megapack.cp_slices import slice_row
from megapack.errors import DataError, ScheduleError, of_all_ranks
from megapack.experts import ModelRouting
from megapack.forward import LastStage, taken_inputs
from megapack.frozen import keep_gradients_through_recompute
from megapack.guard import guarded
from megapack.head import unwrapped
from megapack.job import current_job
from megapack.layout import Layout
from megapack.loss import LossWeighting
from megapack.mtp import loss_coefs, loss_names, num_depths, with_rows_ahead
from megapack.objectives import AnyObjective, metric_names
from megapack.out_of_memory import check_retry
from megapack.outputs import Scope, scatter_to_samples, sum_metrics
from megapack.plan import Plan
from megapack.plan_check import check_plan
from megapack.routing import RoutingPass, collect_routing, token_weight
from megapack.run_context import evaluating, process_groups
from megapack.samples import SampleBatch
from megapack.schedule_run import Rows, ScheduleRunner
from megapack.step_call import ForwardCall, StepCall, TrainingCall
from megapack.thd import PackedRow, pack_row

# Ranks come to one call at about the same time.
_OTHER_CALL_S = 30.0


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
        retries_oom: a step in which a GPU runs out of memory is carried to its end and raises
            StepOutOfMemory on every rank, which may try again; see `out_of_memory`.

    Raises:
        ScheduleError: a setting that Megatron would hang or train wrongly with, and what to set.
    """

    runner_class = ScheduleRunner
    """What runs the packed rows; a subclass may set one of its own."""

    def __init__(
        self,
        model: Sequence[torch.nn.Module] | torch.nn.Module,
        *,
        layout: Layout,
        logprob_chunk_tokens: int = 1024,
        temperature: float = 1.0,
        head: settings.Head = "vocabulary",
        retries_oom: bool = False,
    ) -> None:
        self.chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        self.layout, self.head = layout, head
        self.config = get_model_config(self.chunks[0])
        self.job = current_job()
        self._device = torch.device(torch.cuda.current_device())
        # Stages differ in their layers: what one refuses, all do.
        self._routing = agree(lambda: self._checked(retries_oom), device=self._device)
        keep_gradients_through_recompute(self.chunks, self.config)
        self._groups = process_groups()
        self._dp_group = parallel_state.get_data_parallel_group()
        self.runner = self.runner_class(
            self.chunks,
            self.config,
            layout,
            self._groups,
            device=self._device,
            routing=self._routing,
            place=self.job.watchdog.place,
            retries_oom=retries_oom,
        )
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
        self._next: tuple[StepCall, Agreement[Rows]] | None = None

    def _checked(self, retries_oom: bool) -> ModelRouting:
        settings.check_layout(self.layout, len(self.chunks))
        settings.check_config(self.config, self.layout)
        settings.check_chunks(self.chunks)
        if retries_oom:
            check_retry(self.layout, self.chunks, self.config)
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
        next_step: int | None = None,
    ) -> StepResult:
        """Forward and backward of one step; gradients are added to the model's.

        A collective: every rank calls it with the same plan, step, objective and weighting.

        Args:
            plan: made for this layout and the lengths of `batch`.
            batch: the samples that the plan counts.
            objective: per-token losses; its required fields must be in the batch.
            step: which of the plan's steps.
            weighting: how tokens weigh, see `loss.sample_weights`.
            norm_constant: of the weighting that has one.
            entropy: report the entropy even where the objective does not read it.
            routing: experts to take, per sample [tokens, MoE layers, experts per token] of the
                samples of this data-parallel rank, as `forward(record_routing=True)` gives them;
                None lets the routers choose. Probabilities are those of the current logits.
            next_step: the step of this plan that is called next, with all else the same: it is
                packed and agreed on while this one runs, so that fields may not be changed in
                place meanwhile; `set_field` is noticed. None where nothing is known of it.

        Raises:
            ScheduleError: on every rank, where plans differ, one rank's work failed, or a loss or
                gradient is no number.
            StepOutOfMemory: on every rank; see `retries_oom`.
            RankError: on every rank, where one failed or ended inside the step; the process groups
                are of no use then.
        """
        call = TrainingCall(
            plan=plan,
            batch=batch,
            step=step,
            revision=batch.revision,
            objective=objective,
            weighting=weighting,
            norm_constant=norm_constant,
            entropy=entropy,
            routing=routing,
        )
        with guarded(self.job.watchdog, f"step {step} of plan {plan.digest()[:12]}"):
            rows = self._agreed_rows(call)
            if next_step is not None:
                self._next = self._start(replace(call, step=next_step))
            last = LastStage(objective, with_entropy=call.with_entropy, **self._head_options)
            routers = RoutingPass(token_weight=token_weight(plan.steps[step]))
            self._run(call, rows, last, routers, forward_only=False)
            sums = sum_metrics(
                last.sums,
                [*metric_names(objective, call.with_entropy), *loss_names(self.config)],
                dp_cp_group=self._groups.dp_cp,
                pp_group=self._groups.pp,
                device=self._device,
            )
            sums |= self._routing.metrics(routers, self._device)
            _refuse_loss(sums["loss"])
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

        Raises:
            ScheduleError, RankError: as `step` does.
        """
        call = ForwardCall(
            plan=plan,
            batch=batch,
            step=step,
            revision=batch.revision,
            entropy=entropy,
            scope=scope,
            routing=routing,
            record_routing=record_routing,
        )
        name = f"forward pass {step} of plan {plan.digest()[:12]}"
        with (
            guarded(self.job.watchdog, name),
            torch.no_grad(),
            evaluating(self.chunks),
        ):
            rows = self._agreed_rows(call)
            last = LastStage(None, with_entropy=entropy, **self._head_options)
            routers = RoutingPass(record=record_routing)
            self._run(call, rows, last, routers, forward_only=True)
            return self._outputs(call, rows, last)

    def _outputs(
        self, call: ForwardCall, rows: Rows, last: LastStage
    ) -> dict[str, list[Tensor | None]]:
        batch, step = call.batch, call.plan.steps[call.step]
        names = ("logprobs", "entropy") if call.entropy else ("logprobs",)
        if self.head == "value":
            names = ("values", "scores")
        outputs = {
            name: scatter_to_samples(
                last.outputs[name],
                [1] * len(batch) if name == "scores" else batch.lengths,
                step,
                dp_rank=self.dp_rank,
                dp_cp_group=self._groups.dp_cp,
                cp_group=self._groups.cp,
                pp_group=self._groups.pp,
                scope=call.scope,
                device=self._device,
            )
            for name in names
        }
        if call.record_routing:
            groups = [self._groups.pp, self._groups.cp]
            groups += [self._groups.tp] if self.layout.sequence_parallel else []
            groups += [self._dp_group] if call.scope == "all" else []
            outputs["routing"] = collect_routing(
                [row for row in rows[1] if row is not None],
                batch.lengths,
                step,
                self._routing.shape,
                dp_rank=self.dp_rank,
                scope=call.scope,
                groups=groups,
                device=self._device,
            )
        return outputs

    def _agreed_rows(self, call: StepCall) -> Rows:
        """This rank's rows, once all ranks have theirs for the same call."""
        self.job.watchdog.place.enter("pack")
        prepared, self._next = self._next, None
        if prepared is None:
            rows = self._start(call)[1].result()
        elif prepared[0].key == call.key:
            rows = prepared[1].result()
        else:
            rows = self._other_rows(call)
        self._check_inputs(call.batch.tensor_names)
        return rows

    def _other_rows(self, call: StepCall) -> Rows:
        """Rows of another call than `next_step` announced. Where not all ranks make such a call,
        the others are in a step by now, and only the watchdog's board reaches them."""
        try:
            return self._start(call)[1].result(_OTHER_CALL_S)
        except Exception as error:
            raise ScheduleError(
                f"this rank's step {call.step} is another call than next_step announced (another "
                "plan, batch or step, or fields that were set since), and the ranks do not agree "
                f"on it: {error}; make the same calls on all ranks, or pass next_step=None"
            ) from error

    def _start(self, call: StepCall) -> tuple[StepCall, Agreement[Rows]]:
        return call, self.job.agreements.start(lambda: self._check_and_pack(call), call.same)

    def _check_and_pack(self, call: StepCall) -> Rows:
        plan, batch = call.plan, call.batch
        if plan.layout != self.layout:
            raise DataError(f"the plan is for {plan.layout}, the adapter for {self.layout}")
        settings.check_head(self.chunks, self.head)
        if plan.policy.row_shape == "planned":
            settings.check_planned_rows(self.config)
        settings.check_counts(plan, self.config)
        if plan.digest() != self._checked_digest:
            check_plan(plan, batch.lengths)
            self._checked_digest = plan.digest()
        if isinstance(call, TrainingCall):
            settings.check_reduction(self.config, self.chunks, self.layout)
        call.check(self.head)
        rows = [self._packed(call, microbatch) for microbatch in call.rows(self.dp_rank)]
        return rows, self._routing.rows(rows, call.routing, record=call.records_routing)

    def _packed(self, call: StepCall, microbatch: Any) -> PackedRow:
        plan, cp = call.plan, self._groups.cp
        row = pack_row(
            call.batch,
            microbatch,
            plan.layout,
            call.sample_weights,
            call.field_names,
            plan.colocate_ids,
            getattr(unwrapped(self.chunks[0]), "vocab_size", None),
        )
        depths = num_depths(self.config) if isinstance(call, TrainingCall) else 0
        return slice_row(with_rows_ahead(row, depths), cp.size(), cp.rank())

    def _check_inputs(self, names: tuple[str, ...]) -> None:
        """A tensor that no chunk of any rank takes would be left out in silence."""
        if names in self._checked_inputs:
            return
        taken = {name for chunk in self.chunks for name in taken_inputs(chunk, names)}
        found = on_any_rank([name in taken for name in names], device=self._device)
        for name, is_taken in zip(names, found, strict=True):
            if not is_taken:
                raise of_all_ranks(
                    ScheduleError(
                        f"no model chunk's forward takes {name!r}, which the batch has as a "
                        "tensor; add the argument to the model's forward, or leave the tensor out"
                    )
                )
        self._checked_inputs.add(names)

    def _run(
        self,
        call: StepCall,
        rows: Rows,
        last_stage: LastStage,
        routers: RoutingPass,
        *,
        forward_only: bool,
    ) -> None:
        step = call.plan.steps[call.step]
        self.job.watchdog.place.enter("schedule")
        self.runner.run(call.plan, step, rows, last_stage, routers, forward_only=forward_only)
        self.job.watchdog.place.enter("output")
        self.runner.flags.refuse([row.samples for row in rows[0]], device=self._device)


def _refuse_loss(loss: float) -> None:
    if not math.isfinite(loss):
        raise ScheduleError(
            f"the step's loss is {loss}, though every micro-batch's is a number; throw the "
            "gradients away, and look at the weights of the samples"
        )
