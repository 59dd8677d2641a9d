"""Megatron's forward step: one packed row through a model chunk, and on the last chunk the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megapack.loss.distillation import TEACHER_IDS
from megapack.loss.sequence import call_objective, reads_topk
from megapack.loss.token import Objective
from megapack.model.adapters import begin_row
from megapack.model.head import DeferredHead, ValueHead, deferred_head, row_scores, unwrapped
from megapack.model.logprobs import VocabHead, vocab_parallel_logprobs
from megapack.model.mtp import inputs_ahead, loss_name
from megapack.rows.packed import PlacedRow, RowTokens, unpack_row
from megapack.rows.schedule_pass import MAXIMUM, SchedulePass
from megapack.rows.segments import row_segments
from megapack.schedule.chains import ChainLosses, LossInputs
from megapack.schedule.faults import FiniteFlags, TokenLosses
from megapack.schedule.listeners import Kind, Listener, Listeners

LossReport = tuple[Tensor, Tensor, dict[str, Tensor]]
"""What Megatron's loss function returns: loss sum, token count, report.

The weights already include the whole normalisation, so the token count is 0: Megatron then does not
divide (later versions divide by max(0, 1)).
"""


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """How the last stage turns hidden states into log-probs or values; fixed for all steps."""

    vocab: Callable[..., VocabHead]
    """Makes a `VocabHead` of a weight: the class with the other settings."""
    tp_group: Any
    """Ranks that share the vocabulary."""
    sequence_parallel: bool
    """Whether each tensor-parallel rank has only its slice of the hidden states."""
    mtp_coefs: Sequence[float] = ()
    """Coefficient of the loss of each depth of multi-token prediction."""


@dataclass(kw_only=True, eq=False)
class LastStage:
    """Turns hidden states into log-probs or values, and these into losses or outputs."""

    objective: Objective | None
    """Per-token losses; None for a pass that only collects log-probs or values."""
    with_entropy: bool
    """Compute the entropy even if the objective does not need it."""
    options: HeadOptions
    schedule_pass: SchedulePass
    """Collects the sums and outputs."""
    note: Callable[[TokenLosses], None]
    """Is called with the losses of each row."""

    def __post_init__(self) -> None:
        self._chains = ChainLosses(self._objective_loss)

    def __call__(self, row: PlacedRow, head: DeferredHead, hidden: Tensor) -> LossReport:
        """The loss of one row; without an objective, a sum whose gradient is not used."""
        if isinstance(head.output_layer, ValueHead):
            return self._values(row, head.output_layer, self._whole_row(hidden))
        hidden, *hidden_ahead = hidden.flatten(0, -2).chunk(1 + len(self.options.mtp_coefs))
        find = self._topk_logprobs if reads_topk(self.objective) else self._logprobs
        logprobs_R, entropy_R = find(row, head, hidden, self.with_entropy)
        if self.objective is None:
            self._collect(row, {"logprobs": logprobs_R, "entropy": entropy_R})
            return _report(logprobs_R.sum())
        loss = self._loss(row, logprobs_R, entropy_R, None)
        return _report(loss + self._losses_ahead(row, head, hidden_ahead))

    def _values(self, row: PlacedRow, layer: ValueHead, hidden_TH: Tensor) -> LossReport:
        values_T = layer(hidden_TH)[0][:, 0]
        values_R = values_T[row.losses.positions_R]
        scores_n = row_scores(row, values_T)
        if self.objective is not None:
            return _report(self._loss(row, values_R, None, scores_n))
        self._collect(row, {"values": values_R})
        # Every context-parallel rank has the scores, but outputs are summed over these ranks.
        if row.cp_group is None or row.cp_group.rank() == 0:
            self._add_outputs(row, "scores", scores_n.unbind())
        return _report(values_R.sum())

    def _loss(
        self, row: PlacedRow, values_R: Tensor, entropy_R: Tensor | None, scores_n: Tensor | None
    ) -> Tensor:
        inputs = LossInputs(
            values_R=values_R,
            entropy_R=entropy_R,
            fields=row.losses.fields,
            weights_R=row.losses.weights_R,
            segments=row_segments(row, scores_n=scores_n),
            rows=[row],
        )
        if row.link is None:
            return self._objective_loss(inputs)
        return self._chains.add(row.link, inputs)

    def _objective_loss(self, inputs: LossInputs) -> Tensor:
        assert self.objective is not None
        losses_R, metrics = call_objective(
            self.objective, inputs.values_R, inputs.entropy_R, inputs.fields, inputs.segments
        )
        values_R = inputs.values_R.detach()
        reads_values = getattr(self.objective, "reads", None) == "values"
        self.note(
            TokenLosses(
                rows=inputs.rows,
                order_R=inputs.order_R,
                losses_R=losses_R.detach(),
                # A teacher's ids come after the label.
                values_R=values_R[:, 0] if values_R.dim() == 2 else values_R,
                fields=inputs.fields,
                reads="value" if reads_values else "log-prob",
            )
        )
        if inputs.entropy_R is not None:
            metrics = {"entropy": inputs.entropy_R, **metrics}
        return self._add_up(inputs.weights_R, {"loss": losses_R, **metrics})

    def _logprobs(
        self, row: RowTokens, head: DeferredHead, hidden: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        positions_U = row.losses.head_positions_U
        hidden_UH = self._whole_row(hidden)[positions_U].to(head.weight_VH.dtype)
        vocab = self._vocab_head(head, with_entropy)
        logprobs_U, entropy_U = vocab_parallel_logprobs(hidden_UH, row.labels_T[positions_U], vocab)
        index_R = row.losses.head_index_R
        if index_R is None:
            return logprobs_U, entropy_U
        return logprobs_U[index_R], None if entropy_U is None else entropy_U[index_R]

    def _topk_logprobs(
        self, row: RowTokens, head: DeferredHead, hidden: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the label and of a teacher's ids at each loss, [R, 1 + K].

        Samples that share a position may have different ids there, so a position is computed once
        for each of its losses.
        """
        losses = row.losses
        ids_RK = losses.fields[TEACHER_IDS]
        if ids_RK.dim() == 1:
            # A padding micro-batch knows no K.
            ids_RK = ids_RK.to(torch.int64)[:, None]
        labels_RK = torch.cat([row.labels_T[losses.positions_R, None], ids_RK], dim=1)
        hidden_RH = self._whole_row(hidden)[losses.positions_R].to(head.weight_VH.dtype)
        return vocab_parallel_logprobs(hidden_RH, labels_RK, self._vocab_head(head, with_entropy))

    def _vocab_head(self, head: DeferredHead, with_entropy: bool) -> VocabHead:
        weight_VH, tied = head.weight_VH, head.tied
        return self.options.vocab(weight_VH=weight_VH, tied=tied, with_entropy=with_entropy)

    def _losses_ahead(
        self, row: PlacedRow, head: DeferredHead, hidden: Sequence[Tensor]
    ) -> Tensor | float:
        total: Tensor | float = 0.0
        depths = zip(self.options.mtp_coefs, row.ahead, hidden, strict=True)
        for depth, (coef, ahead, hidden_ahead) in enumerate(depths, start=1):
            logprobs_R, _ = self._logprobs(ahead, head, hidden_ahead, with_entropy=False)
            loss = -(ahead.losses.weights_R * logprobs_R).sum()
            self.schedule_pass.add(loss_name(depth), loss)
            total = total + coef * loss
        return total

    def _whole_row(self, hidden: Tensor) -> Tensor:
        rows_TH = hidden.flatten(0, -2)
        if not self.options.sequence_parallel:
            return rows_TH
        # The head's backward gives every rank the whole gradient, so the backward of this gather
        # only takes the rank's slice.
        return gather_from_sequence_parallel_region(  # type: ignore[no-any-return]
            rows_TH, tensor_parallel_output_grad=False, group=self.options.tp_group
        )

    def _add_up(self, weights_R: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        for name, values_R in values.items():
            if not name.endswith(MAXIMUM):
                self.schedule_pass.add(
                    name, (weights_R * values_R.detach()).sum(dtype=torch.float64)
                )
            elif values_R.numel():
                self.schedule_pass.add(name, values_R.max())
        return (weights_R * values["loss"]).sum()

    def _collect(self, row: PlacedRow, values: Mapping[str, Tensor | None]) -> None:
        for name, values_R in values.items():
            if values_R is None:
                continue
            # Losses of other context-parallel ranks stay zero, so that the sum over these ranks is
            # the whole row.
            self._add_outputs(row, name, unpack_row(row, values_R))

    def _add_outputs(self, row: PlacedRow, name: str, values: Sequence[Tensor]) -> None:
        outputs = self.schedule_pass.outputs[name]
        for sample, value in zip(row.samples, values, strict=True):
            # Each row of a sample in pieces has 0 for its other tokens.
            outputs[sample] = outputs[sample] + value if sample in outputs else value


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """One pass over the rows of a step, and what watches it."""

    schedule_pass: SchedulePass
    listeners: Sequence[Listener] = ()
    """Are called at each forward, backward and computation of weight gradients."""
    flags: FiniteFlags = field(default_factory=FiniteFlags)
    """One of the listeners, which also looks at gradients."""


class _RowOfBackward(Listener):
    """Tells routers and adapters whose forward is recomputed which row it is."""

    def __init__(self, schedule_pass: SchedulePass) -> None:
        self._pass = schedule_pass
        self.rows: dict[int, PlacedRow] = {}
        """Of each micro-batch that has run."""

    def on_begin(self, kind: Kind, chunk: int, microbatch: int) -> None:
        if kind == "B":
            self._pass.recomputed = self.rows[microbatch].routing
            begin_row(self.rows[microbatch])


class ForwardStep:
    """Megatron's `forward_step_func` for one pass over a step's rows.

    Args:
        chunks: the model chunks of this rank.
        last_stage: the loss function of the last chunk.
        context: the pass, which gives the routers the row that is being run.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        last_stage: Callable[[PlacedRow, DeferredHead, Tensor], LossReport],
        context: PassContext,
    ) -> None:
        self._chunks = chunks
        self._last_stage = last_stage
        self._pass = context.schedule_pass
        self._rows = _RowOfBackward(self._pass)
        self._listeners = Listeners([*context.listeners, self._rows])

    def __call__(
        self, rows: Iterator[tuple[int, PlacedRow]], model: Any
    ) -> tuple[Tensor, Callable[[Tensor], LossReport] | None]:
        """The chunk's output, and on the pipeline's last chunk the loss function.

        Args:
            rows: (micro-batch, row).
        """
        microbatch, row = next(rows)
        chunk = next(i for i, own in enumerate(self._chunks) if own is model)
        self._rows.rows[microbatch] = row
        self._listeners.begin("F", chunk, microbatch)
        output, head = self.run_row(row, model)
        if head is None:
            self._listeners.end_forward(chunk, microbatch, output)
            return output, None
        # Megatron calls the loss function right after, which ends the forward of the last chunk.
        return output, partial(self._loss, row, head, chunk, microbatch)

    def run_row(self, row: PlacedRow, model: Any) -> tuple[Tensor, DeferredHead | None]:
        """Run the row through a model chunk.

        Returns:
            The output and None; on the last chunk the hidden states and the head, which is not run.
        """
        self._pass.routing = row.routing
        begin_row(row)
        inputs: dict[str, Any] = {
            "input_ids": row.tokens_T[None],
            "position_ids": row.position_ids_T[None],
            "attention_mask": None,
            "packed_seq_params": row.params,
            **{name: row.tensors[name] for name in accepted_inputs(model, tuple(row.tensors))},
        }
        if not unwrapped(model).post_process:
            return model(**inputs), None
        shifting = inputs_ahead(row, inputs["input_ids"], inputs["position_ids"])
        with deferred_head(model) as head, shifting:
            return model(**inputs, **_in_own_dtype(model)), head

    def _loss(
        self, row: PlacedRow, head: DeferredHead, chunk: int, microbatch: int, hidden: Tensor
    ) -> LossReport:
        report = self._last_stage(row, head, hidden)
        self._listeners.end_forward(chunk, microbatch, report[0])
        return report


def accepted_inputs(model: Any, names: Sequence[str]) -> tuple[str, ...]:
    """The names that are arguments of a model chunk's forward.

    Only named arguments count: where a forward passes its `**kwargs` cannot be known.
    """
    if not names:
        return ()
    known = inspect.signature(unwrapped(model).forward).parameters
    return tuple(name for name in names if name in known)


def _in_own_dtype(model: Any) -> dict[str, bool]:
    """Arguments that keep the last chunk's hidden states in the model's dtype.

    Float16Module widens outputs to fp32 unless it is asked not to. The widened hidden states hold
    the same numbers in twice the bytes, which the gather over tensor-parallel ranks would move.
    """
    while hasattr(model, "module"):
        if isinstance(model, Float16Module):
            return {"fp32_output": False}
        model = model.module
    return {}


def _report(loss: Tensor) -> LossReport:
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}
