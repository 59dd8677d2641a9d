"""What a pipeline stage does with a packed row: the forward, and on the last stage the loss."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megapack.attention import packed_seq_params
from megapack.head import DeferredHead, deferred_head, unwrapped
from megapack.logprobs import VocabHead, vocab_parallel_logprobs
from megapack.mtp import loss_name
from megapack.objectives import AnyObjective, call_objective
from megapack.routing import RoutingPass, RoutingRow
from megapack.segments import row_segments
from megapack.thd import PackedRow, unpack_row
from megapack.value_head import ValueHead, row_scores


class DeviceRow:
    """A packed row on the device, with what every model chunk needs of it made once."""

    def __init__(
        self,
        row: PackedRow,
        device: torch.device,
        routing: RoutingRow | None = None,
    ) -> None:
        self.row = row.to(device)
        self.routing = None if routing is None else routing.to(device)
        self.params: PackedSeqParams = packed_seq_params(
            self.row.cu_seqlens_padded_S1,
            row.max_seqlen,
            row.row_tokens,
            cp=row.row_tokens // row.tokens_T.numel(),
        )


class LastStage:
    """Turns hidden states into log-probs or values, losses and outputs, and adds up what they were.

    Args:
        objective: per-token losses; None for a pass that only collects log-probs or values.
        tp_group: ranks that share the vocabulary.
        cp_group: ranks that share the row.
        sequence_parallel: hidden states come as slices of the row.
        with_entropy: compute the entropy even where the objective does not ask for it.
        chunk_tokens, temperature: see `VocabHead`.
        mtp_coefs: weight of the loss of each depth of multi-token prediction.
    """

    def __init__(
        self,
        objective: AnyObjective | None,
        *,
        tp_group: Any,
        cp_group: Any,
        sequence_parallel: bool,
        with_entropy: bool,
        chunk_tokens: int,
        temperature: float,
        mtp_coefs: Sequence[float] = (),
    ) -> None:
        self.objective = objective
        self.sums: dict[str, Tensor] = {}
        self.outputs: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self._tp_group, self._cp_group = tp_group, cp_group
        self._sequence_parallel = sequence_parallel
        self._with_entropy = with_entropy
        self._mtp_coefs = mtp_coefs
        self._head_options = {"chunk_tokens": chunk_tokens, "temperature": temperature}

    def __call__(
        self, row: PackedRow, head: DeferredHead, hidden: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Megatron's loss function: (loss sum, token count, report).

        The weights are whole already, so the token count is 0: Megatron then divides by nothing
        (later versions by max(0, 1)).
        """
        if isinstance(head.output_layer, ValueHead):
            return self._values(row, head.output_layer, self._whole_row(hidden))
        positions_R = row.loss_positions_R
        hidden, *hidden_ahead = hidden.flatten(0, -2).chunk(1 + len(self._mtp_coefs))
        logprobs_R, entropy_R = self._logprobs(row, head, hidden, self._with_entropy)
        if self.objective is None:
            self._collect(row, positions_R, {"logprobs": logprobs_R, "entropy": entropy_R})
            return _without_division(logprobs_R.sum())
        loss = self._loss(row, logprobs_R, entropy_R, None)
        return _without_division(loss + self._losses_ahead(row, head, hidden_ahead))

    def _values(
        self, row: PackedRow, layer: ValueHead, hidden_TH: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        positions_R = row.loss_positions_R
        values_T = layer(hidden_TH)[0][:, 0]
        values_R, scores_n = values_T[positions_R], row_scores(row, values_T, self._cp_group)
        if self.objective is not None:
            return _without_division(self._loss(row, values_R, None, scores_n))
        self._collect(row, positions_R, {"values": values_R})
        # Every context-parallel rank has the scores, and outputs are summed over these ranks.
        if self._cp_group.rank() == 0:
            self.outputs["scores"].update(zip(row.samples, scores_n.unbind(), strict=True))
        return _without_division(values_R.sum())

    def _loss(
        self,
        row: PackedRow,
        values_R: Tensor,
        entropy_R: Tensor | None,
        scores_n: Tensor | None,
    ) -> Tensor:
        assert self.objective is not None
        positions_R = row.loss_positions_R
        fields = {name: values_T[positions_R] for name, values_T in row.fields.items()}
        segments = row_segments(row, positions_R, scores_n=scores_n, cp_group=self._cp_group)
        losses_R, metrics = call_objective(self.objective, values_R, entropy_R, fields, segments)
        if entropy_R is not None:
            metrics = {"entropy": entropy_R, **metrics}
        return self._add_up(row.weights_T[positions_R], {"loss": losses_R, **metrics})

    def _logprobs(
        self, row: PackedRow, head: DeferredHead, hidden: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        positions_R = row.loss_positions_R
        hidden_RH = self._whole_row(hidden)[positions_R].to(head.weight_VH.dtype)
        vocab = VocabHead(
            weight_VH=head.weight_VH,
            tp_group=self._tp_group,
            with_entropy=with_entropy,
            **self._head_options,  # type: ignore[arg-type]
        )
        return vocab_parallel_logprobs(hidden_RH, row.labels_T[positions_R], vocab)

    def _losses_ahead(
        self, row: PackedRow, head: DeferredHead, hidden: Sequence[Tensor]
    ) -> Tensor | float:
        total: Tensor | float = 0.0
        depths = zip(self._mtp_coefs, row.ahead, hidden, strict=True)
        for depth, (coef, ahead, hidden_ahead) in enumerate(depths, start=1):
            logprobs_R, _ = self._logprobs(ahead, head, hidden_ahead, with_entropy=False)
            weights_R = ahead.weights_T[ahead.loss_positions_R]
            loss = -(weights_R * logprobs_R).sum()
            name = loss_name(depth)
            self.sums[name] = self.sums.get(name, 0.0) + loss.detach().double()
            total = total + coef * loss
        return total

    def _whole_row(self, hidden: Tensor) -> Tensor:
        rows_TH = hidden.flatten(0, -2)
        if not self._sequence_parallel:
            return rows_TH
        # The head's backward gives every rank the whole gradient: each takes its slice back.
        return gather_from_sequence_parallel_region(  # type: ignore[no-any-return]
            rows_TH, tensor_parallel_output_grad=False, group=self._tp_group
        )

    def _add_up(self, weights_R: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        for name, values_R in values.items():
            weighted = (weights_R * values_R.detach()).sum(dtype=torch.float64)
            self.sums[name] = self.sums.get(name, 0.0) + weighted
        return (weights_R * values["loss"]).sum()

    def _collect(
        self, row: PackedRow, positions_R: Tensor, values: Mapping[str, Tensor | None]
    ) -> None:
        for name, values_R in values.items():
            if values_R is None:
                continue
            values_T = values_R.new_zeros(row.row_tokens)
            # Zeros where other context-parallel ranks have values: the sum over them is whole.
            values_T[row.row_positions_T[positions_R]] = values_R
            for sample, value in zip(row.samples, unpack_row(row, values_T), strict=True):
                self.outputs[name][sample] = value


ForwardStep = Callable[[Iterator[DeviceRow], Any], tuple[Tensor, Callable[[Tensor], Any] | None]]
"""What `RowForward` is called with and returns."""


class RowForward:
    """Megatron's `forward_step_func`: one packed row through one model chunk."""

    def __init__(self, last_stage: LastStage, routing: RoutingPass) -> None:
        self.last_stage, self.routing = last_stage, routing

    def __call__(
        self, rows: Iterator[DeviceRow], model: Any
    ) -> tuple[Tensor, Callable[[Tensor], Any] | None]:
        """The chunk's output, and on the pipeline's last chunk the loss function."""
        device_row = next(rows)
        row, self.routing.row = device_row.row, device_row.routing
        inputs = {
            "input_ids": row.tokens_T[None],
            "position_ids": row.position_ids_T[None],
            "attention_mask": None,
            "packed_seq_params": device_row.params,
            **{name: row.tensors[name] for name in taken_inputs(model, tuple(row.tensors))},
        }
        if not unwrapped(model).post_process:
            return model(**inputs), None
        with deferred_head(model) as head:
            hidden = model(**inputs)
        return hidden, partial(self.last_stage, row, head)


def taken_inputs(model: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Those of the names that the forward of a model chunk has as arguments.

    Only arguments of their own count: what `**kwargs` are passed on to cannot be seen.
    """
    if not names:
        return ()
    known = inspect.signature(unwrapped(model).forward).parameters
    return tuple(name for name in names if name in known)


def _without_division(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}
