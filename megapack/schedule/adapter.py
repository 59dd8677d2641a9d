"""The adapter around Megatron's `forward_backward_func`: one planned step at a time.

    plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=16384)
    adapter = ScheduleAdapter(model_chunks, layout=layout)
    result = adapter.step(plan, batch, objective=PPO())       # gradients are in the model now

The optimizer is yours. `forward` runs the same rows without gradients and returns per-token
log-probs in sample order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from megapack.base.choices import ExecutorChoice
from megapack.errors import ConfigError, DataError, ScheduleError, of_all_ranks
from megapack.layout import Layout
from megapack.loss.sequence import metric_names
from megapack.loss.token import LossWeighting, Objective
from megapack.model.attention.latent import close_gaps
from megapack.model.attention.rotary import gather_rotary_tables
from megapack.model.attention.te_rows import hook_te_attention
from megapack.model.biases import repair_biases
from megapack.model.experts.model import ModelRouting
from megapack.model.experts.rows import collect_routing
from megapack.model.head import marked
from megapack.model.logprobs import VocabHead
from megapack.model.mtp import loss_coefs, loss_names
from megapack.model.overlap import gathering_again
from megapack.model.parameters import (
    gather_norm_outputs,
    keep_gradients_through_recompute,
    mark_splits,
)
from megapack.plan.plan import Plan
from megapack.ranks.agree import Agreement, agree, on_any_rank
from megapack.ranks.links import Ranks, process_ranks
from megapack.rows.outputs import Scope, reduce_metrics, scatter_to_samples
from megapack.rows.packed import PackedRow
from megapack.rows.schedule_pass import SchedulePass
from megapack.samples import SampleBatch
from megapack.schedule import checks
from megapack.schedule.ahead import Ahead
from megapack.schedule.between_steps import BetweenSteps
from megapack.schedule.call import StepCall
from megapack.schedule.faults import check_loss
from megapack.schedule.forward import HeadOptions, accepted_inputs
from megapack.schedule.packer import Packed, Packer
from megapack.schedule.runner import ScheduleRunner, evaluating, process_groups

# Seconds to wait for the other ranks if a call is not the one that `next_step` announced. Ranks
# make a call at about the same time; after a longer wait, the others must have made the announced
# one. Chosen by hand.
_OTHER_CALL_S = 30.0


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a training step, the same on every rank."""

    loss: float
    """Sum over all tokens of the step of weight * loss."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The objective's metrics by name: sums of weight * value, or the maximum of one in `_max`."""


# The calls of a `ScheduleAdapter.step`, in order. `Packer`: `pack_row` makes a `PackedRow`
# of each micro-batch, on a thread during the step before if that one announced this. `agree`: all
# ranks have packed the same call, or all raise. `ScheduleRunner.run`: Megatron's schedule, or the
# plan's operations, run rows with a `ForwardStep`; `LastStage` computes the loss. Then all ranks
# raise if one has a NaN, and `reduce_metrics` adds sums over ranks.
class ScheduleAdapter:
    """Trains a Megatron-Core model on planned steps, and computes log-probs with it.

        adapter = ScheduleAdapter(model_chunks, layout=layout)
        plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=16384)
        batch.set_field("old_logprobs", adapter.forward(plan, batch)["logprobs"])
        result = adapter.step(plan, batch, objective=GRPO())

    Every rank makes one after Megatron's process groups; the constructor and both methods are
    collectives of all ranks.

    Args:
        model: this rank's GPT chunks, one per virtual stage, with or without Megatron's DDP.
        layout: the layout of the plans; must have the sizes of Megatron's process groups.
        vocab_size: number of token ids, if the model pads its vocabulary. Rows after them get
            neither probability nor gradient, and such ids are refused. None: what `build_model`
            was given; for another model, all of its rows are ids.
        logprob_chunk_tokens: positions whose logits are in memory at one time. None: a number that
            follows from the vocabulary.
        temperature: logits are divided by it, in log-probs and gradients.
        head: "value" for a model with a value head, see `replace_output_layer`.
        executor: what runs a step: "megatron", its `forward_backward_func`; "operations", the
            plan's own order of operations; "auto", what the plan's policy needs.
        vision: a `VisionTower`, in Megatron's DDP or not, which encodes the images of batches;
            None: batches have none. Zero its gradients and update it as the chunks.
        ranks: the threads that pack ahead and carry errors between ranks. None: the first adapter
            of a process starts them for all its adapters, and a job of one process has none.
            `launch.stop`, or the end of the process, ends them.

    Raises:
        ConfigError: Megatron would hang or train wrongly with these settings; all are named.
        ScheduleError: only some ranks refuse their settings.
    """

    runner_class = ScheduleRunner
    """Runs the packed rows; a subclass may set another class."""

    def __init__(
        self,
        model: Sequence[torch.nn.Module] | torch.nn.Module,
        *,
        layout: Layout,
        vocab_size: int | None = None,
        logprob_chunk_tokens: int | None = None,
        temperature: float = 1.0,
        head: checks.Head = "vocabulary",
        executor: ExecutorChoice = "auto",
        vision: torch.nn.Module | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        self.layout = layout
        self.head = head
        self.executor = executor
        self.config = get_model_config(self.chunks[0])
        self.ranks = process_ranks() if ranks is None else ranks
        self.ranks.check()
        checks.warn_of_newer_version()
        self._device = torch.device(torch.cuda.current_device())
        self.vocab_size = agree(
            lambda: checks.checked_vocab_size(self.chunks, vocab_size), device=self._device
        )
        # Stages differ in their layers: if one refuses its own, all raise.
        self._routing = agree(self._checked_routing, device=self._device)
        gather_norm_outputs(self.chunks)
        repair_biases(self.chunks)
        close_gaps(self.chunks)
        for chunk in self.chunks:
            mark_splits(chunk, etp=layout.etp, gated=self.config.gated_linear_unit)
        gather_rotary_tables(self.chunks)
        hook_te_attention(self.chunks)
        self._groups = process_groups()
        ahead = None
        if vision is not None:
            ahead = Ahead(vision, self.chunks, layout, self._groups, self._device)
        self.runner = self.runner_class(
            self.chunks,
            self.config,
            layout,
            self._groups,
            head=HeadOptions(
                vocab=functools.partial(
                    VocabHead,
                    num_ids=self.vocab_size,
                    tp_group=self._groups.tp,
                    chunk_tokens=logprob_chunk_tokens,
                    temperature=temperature,
                    logit_cap=marked(self.chunks[-1], "logit_cap"),
                ),
                tp_group=self._groups.tp,
                sequence_parallel=layout.sequence_parallel,
                mtp_coefs=loss_coefs(self.config),
            ),
            device=self._device,
            routing=self._routing,
            place=self.ranks.place,
            ahead=ahead,
        )
        self._between_steps = BetweenSteps(self.runner.modules, self.config)
        self._packer = Packer(self.runner, self.head, self.vocab_size)
        # Tensor names that all ranks have agreed on; a batch without tensors needs no agreement.
        self._checked_inputs: set[tuple[str, ...]] = {()}
        # The call that `next_step` announced, and its rows.
        self._announced: tuple[StepCall, Agreement[Packed]] | None = None

    @property
    def modules(self) -> list[Any]:
        """What is trained: the chunks, and the tower if there is one."""
        return self.runner.modules

    def _checked_routing(self) -> ModelRouting:
        has_experts = bool(self.config.num_moe_experts)
        chunks, config, layout = self.chunks, self.config, self.layout
        checks.raise_together(
            lambda: checks.check_layout(layout, len(chunks), has_experts=has_experts),
            *checks.config_checks(config, layout),
            lambda: checks.check_chunks(chunks),
            lambda: checks.check_cp_comm(chunks, config),
            lambda: checks.check_expert_gradients(chunks, layout),
        )
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        return ModelRouting(chunks, config, layout, tp_rank)

    @property
    def dp_rank(self) -> int:
        """This process's data-parallel rank, the index of its rows in the plan's `ranks`."""
        return int(self._groups.dp.rank())

    def step(
        self,
        plan: Plan,
        batch: SampleBatch,
        *,
        objective: Objective,
        step: int = 0,
        weighting: LossWeighting = "token-mean",
        norm_constant: float | None = None,
        entropy: bool = False,
        routing: Sequence[Tensor | None] | None = None,
        next_step: int | None = None,
        next_entropy: bool | None = None,
    ) -> StepResult:
        """Run the forward and backward of one step; its gradients are added to the model's.

            for chunk in model_chunks:
                chunk.zero_grad_buffer()
            result = adapter.step(plan, batch, objective=GRPO(), weighting="seq-mean-token-mean")
            optimizer.step()

        Every rank calls it with the same arguments. Gradients are in `param.main_grad`, fp32 and
        reduced over data-parallel ranks; `param.grad` is empty. (Without Megatron's DDP they are
        in `param.grad`.) Gradients of several steps add up until `zero_grad_buffer`; from the
        second step on that takes memory for a copy of them. After an error, zero them.

        Args:
            plan: a plan for the adapter's layout and for `batch.lengths`.
            batch: all samples of the plan, not only this rank's.
            objective: the loss, one number per response token; the batch must have its fields.
            step: index of the plan's step.
            weighting: what the loss is averaged over, see `sample_weights`.
            norm_constant: tokens per sample under "seq-mean-token-sum-norm"; else None.
            entropy: also report the entropy (nats) as a metric.
            routing: experts to replay, per sample of this DP rank int [tokens, MoE layers,
                experts per token], as `forward(record_routing=True)` returns them. None: the
                routers choose. Routing probabilities come from the current logits.
            next_step: index of the step that is called next with the same other arguments, to pack
                it while this one runs. Do not change fields in place meanwhile; a change by
                `set_field` is noticed. None: not known.
            next_entropy: `entropy` of that next call; None: the same.

        Returns:
            The loss and the objective's metrics, the same on every rank.

        Raises:
            ConfigError, DataError, PlanError: the call cannot run; nothing has changed.
            ScheduleError: on every rank: plans differ, one rank's work failed, or a loss or
                gradient is not finite.
            RankError: on every rank: one of them failed or ended; end the job. The process groups
                cannot be used any more.
            StepOutOfMemory: in a job of one process.
        """
        # `between_steps` clears, handles or refuses what a loop leaves behind between steps.
        call = StepCall(
            plan=plan,
            batch=batch,
            step=step,
            revision=batch.revision,
            objective=objective,
            weighting=weighting,
            norm_constant=norm_constant,
            entropy=entropy,
            routing=routing,
            executor_choice=self.executor,
        )
        with self.ranks.guarded(f"step {step} of plan {plan.digest()[:12]}"):
            rows, images = self._agreed_rows(call)
            if next_step is not None:
                reports = entropy if next_entropy is None else next_entropy
                following = replace(call, step=next_step, entropy=reports)
                self._announced = following, self._prepare(following)
            # A training loop may have frozen the embedding, or set recompute, since the last step.
            keep_gradients_through_recompute(self.chunks, self.config)
            schedule_pass = self.runner.run(call, rows, images)
            self._between_steps.note_step()
            sums = reduce_metrics(
                schedule_pass.sums,
                [*metric_names(objective, call.with_entropy), *loss_names(self.config)],
                dp_cp_group=self._groups.dp_cp,
                pp_group=self._groups.pp,
                device=self._device,
            )
            sums |= self._routing.metrics(schedule_pass, self._device)
            check_loss(sums["loss"])
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
        routing_scope: Scope | None = None,
    ) -> dict[str, list[Tensor | None]]:
        """Compute log-probs (or values) of one step's responses, without gradients.

            old = adapter.forward(plan, batch)["logprobs"]
            batch.set_field("old_logprobs", old)

        Every rank calls it with the same arguments. The model is in evaluation mode meanwhile.

        Args:
            plan, batch, step: as for `step`; a plan with `forward_only=True` suits, too.
            entropy: also return the entropy (nats) of each next-token distribution.
            scope: samples that a rank gets: "all" of the step, or those of its own "dp_rank".
            routing: experts to replay, as for `step`.
            record_routing: also return the experts that each token used.
            routing_scope: the scope of these; None: `scope`.

        Returns:
            By name a list with one fp32 CPU tensor [tokens] per sample, in the batch's order;
            None for samples outside the step or the scope. The names are "logprobs" (nats, 0
            outside the response), "entropy" and "routing", int [tokens, MoE layers, experts per
            token]; a value head gives "values" and "scores" ([1], the last token's value) instead
            of log-probs.

        Raises:
            ConfigError, DataError, PlanError, ScheduleError, RankError: see `step`.
        """
        call = StepCall(
            plan=plan,
            batch=batch,
            step=step,
            revision=batch.revision,
            entropy=entropy,
            scope=scope,
            routing=routing,
            record_routing=record_routing,
            routing_scope=scope if routing_scope is None else routing_scope,
            executor_choice=self.executor,
        )
        name = f"forward pass {step} of plan {plan.digest()[:12]}"
        with (
            self.ranks.guarded(name),
            torch.no_grad(),
            evaluating(self.chunks),
            gathering_again(self.chunks),
        ):
            rows, images = self._agreed_rows(call)
            schedule_pass = self.runner.run(call, rows, images)
            return self._outputs(call, rows, schedule_pass)

    def _outputs(
        self, call: StepCall, rows: list[PackedRow], schedule_pass: SchedulePass
    ) -> dict[str, list[Tensor | None]]:
        lengths = call.batch.lengths
        names = ("logprobs", "entropy") if call.entropy else ("logprobs",)
        if self.head == "value":
            names = ("values", "scores")
        outputs = {
            name: scatter_to_samples(
                schedule_pass.outputs[name],
                [1] * len(lengths) if name == "scores" else lengths,
                call.step_plan,
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
            outputs["routing"] = collect_routing(
                [row.routing for row in rows if row.routing is not None],
                lengths,
                call.step_plan,
                self._routing.shape,
                dp_rank=self.dp_rank,
                scope=call.routing_scope,
                groups=groups,
                dp_group=self._groups.dp,
                device=self._device,
            )
        return outputs

    def _agreed_rows(self, call: StepCall) -> Packed:
        """This rank's rows and images, once all ranks have packed theirs for the same call."""
        self.ranks.place.enter("pack")
        announced, self._announced = self._announced, None
        error: ConfigError | None = None
        try:
            self._between_steps.check(is_training=call.is_training)
        except ConfigError as caught:  # raised on all ranks where they agree on the rows
            error = caught
        if announced is None:
            packed = self._prepare(call, error).result()
        elif announced[0].key == call.key:
            packed = announced[1].result()
            if error is not None:
                raise error
        else:
            packed = self._unannounced_rows(call, error)
        if call.plan.policy.context_parallel == "dynamic":
            self.ranks.place.enter("groups")
            widths = {mb.width for mb in call.step_plan.microbatches}
            self.runner.row_groups.make(widths, self._device)
        if call.executor == "operations":
            self.ranks.place.enter("groups")
            self.runner.channels.make(self._device)
        self._check_inputs(call.batch.tensor_names)
        if self.runner.ahead is not None and packed.images is not None:
            self.runner.ahead.agreed(packed.images)
        return packed

    def _unannounced_rows(self, call: StepCall, error: ConfigError | None) -> Packed:
        """Rows of a call that differs from the one that `next_step` announced.

        If only some ranks make such a call, the others are in a step by now, and only the
        watchdog's board reaches them.
        """
        try:
            return self._prepare(call, error).result(_OTHER_CALL_S)
        except Exception as error:
            raise ScheduleError(
                f"this rank's step {call.step} is not the call that next_step announced (another "
                "plan, batch or step, or fields that were set since), and the ranks do not agree "
                f"on it: {error}; make the same calls on all ranks, or pass next_step=None"
            ) from error

    def _prepare(self, call: StepCall, error: ConfigError | None = None) -> Agreement[Packed]:
        """Pack on a thread, and agree with all ranks; they raise `error` if one of them has one."""

        def work() -> Packed:
            if error is not None:
                raise error
            return self._packer.pack(call)

        return self.ranks.prepare(work, call.same)

    def _check_inputs(self, names: tuple[str, ...]) -> None:
        """Refuse a tensor that no chunk of any rank accepts: it would be ignored silently."""
        if names in self._checked_inputs:
            return
        own = {name for chunk in self.chunks for name in accepted_inputs(chunk, names)}
        are_used = on_any_rank([name in own for name in names], device=self._device)
        for name, is_used in zip(names, are_used, strict=True):
            if not is_used:
                raise of_all_ranks(
                    DataError(
                        f"no model chunk's forward takes {name!r}, which the batch has as a "
                        "tensor; add the argument to the model's forward, or leave the tensor out"
                    )
                )
        self._checked_inputs.add(names)
