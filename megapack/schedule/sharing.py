"""Shared prefixes in the rows of another framework's step: what is read, refused and agreed on.

    read (the host's calls of its model) -> agree (one rank finds the rows, all are told)
        -> model.host_rows.SharedRows (runs them)

The stage with the embedding finds common beginnings in the token ids that the host gives its model.
The other stages cannot: hosts give them a batch before packing, or none. A row that cannot share is
passed on as it is, with one line in the log. A model that would be wrong on shared rows is refused
on every rank, before the step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megapack.errors import ConfigError, ScheduleError
from megapack.layout import Layout, config_rows
from megapack.model.attention.packed import refuse_unpacked_attention
from megapack.model.head import unwrapped
from megapack.model.mtp import num_depths
from megapack.prefixes import HostRow, find_host_row
from megapack.rows.slices import assembly_order, slice_positions
from megapack.schedule import checks
from megapack.schedule.row_rules import check_rows

logger = logging.getLogger(__name__)

RowShape = tuple[int, int]
"""Tokens and batch size of a micro-batch's hidden states on this GPU."""
Spans = tuple[int, ...] | None
"""Padded tokens of each sample of a host's row; None: it shares nothing."""

_WITHOUT = "share_prefixes=False (or unset MEGAPACK_SHARE_PREFIXES)"
# What a model's call may have with one entry per token. Labels and loss masks are read behind the
# decoder, where the row is the host's again.
_KNOWN = ("input_ids", "position_ids", "labels", "loss_mask")


class _Slice(NamedTuple):
    """This rank's slice of a host's row."""

    spans: Spans
    ids_T: Tensor | None
    """int32, on the host."""


@dataclass(eq=False)
class Sharing:
    """The shared prefixes of one call of a schedule, on this rank."""

    chunks: Sequence[Any]
    """The host's, of this rank."""
    config: Any
    """The model's."""
    is_training: bool

    def __post_init__(self) -> None:
        self._slices: list[_Slice] = []
        self._own_hooks = self._hooks()
        tp = parallel_state.get_tensor_model_parallel_world_size()
        self.layout = Layout(
            tp=tp,
            etp=1,
            cp=parallel_state.get_context_parallel_world_size(),
            sequence_parallel=bool(self.config.sequence_parallel) and tp > 1,
            fp8=config_rows(self.config),
        )

    def check(self) -> None:
        """Raise ConfigError if the model would be wrong on shared rows; before any collective."""
        config = self.config
        # A host may run forwards without backwards in training mode.
        drops = any(chunk.training for chunk in self.chunks)
        check_rows(self.chunks, config, {"prefixes"}, is_training=drops, instead=_WITHOUT)
        for chunk in map(unwrapped, self.chunks):
            refuse_unpacked_attention(chunk)
            for name, module in chunk.named_modules():
                if hasattr(module, "routing_type") and (fact := self._why_not_routed(module)):
                    raise ConfigError(f"{name}: {fact}, with shared prefixes; set {_WITHOUT}")
        ep = parallel_state.get_expert_model_parallel_world_size()
        facts = {
            "multi-token prediction reads tokens of the host's row": num_depths(config),
            "CUDA graphs need rows of one length": checks.has_graphs(config),
            "experts drop tokens by their number in the row (moe_expert_capacity_factor)": getattr(
                config, "moe_expert_capacity_factor", None
            ),
            "moe_token_dispatcher_type='allgather' needs equal rows on all ranks": ep > 1
            and config.moe_token_dispatcher_type == "allgather",
        }
        for fact, is_so in facts.items():
            if is_so:
                raise ConfigError(f"{fact}, with shared prefixes; set {_WITHOUT}")

    def _why_not_routed(self, router: Any) -> str:
        """Why a router, Megatron's or a host's own, would be wrong; "" if it is right."""
        replays = [k for k, value in vars(router).items() if "replay" in k and value]
        if replays:
            return f"{replays[0]} has one entry per token of the host's row"
        has_jitter = self.is_training and router.config.moe_input_jitter_eps
        return "moe_input_jitter_eps would give all copies the same noise" if has_jitter else ""

    def _hooks(self) -> dict[int, str]:
        """The forward hooks in the first chunk, by the numbers that torch gives them."""
        return {
            number: f"{name} ({getattr(hook, '__qualname__', hook)})"
            for name, module in unwrapped(self.chunks[0]).named_modules()
            for number, hook in module._forward_hooks.items()
        }

    def watch(self) -> None:
        """Raise ConfigError if the host has hooked modules for its first call of the model.

        NeMo-RL does so for a draft model, which trains on hidden states of all tokens.
        """
        added = {} if self._slices else self._hooks()
        for number, hook in added.items():
            if number not in self._own_hooks:
                raise ConfigError(
                    f"the forward step captures the output of {hook}, which has fewer tokens with "
                    f"shared prefixes; set {_WITHOUT}"
                )

    def note(self, call: Mapping[str, Any]) -> None:
        """Keep what the rows are found by: the arguments of the host's call of its model."""
        if reason := self._why_unshared(call):
            log_once(f"a row of the host shares no prefixes: {reason}")
            self._slices.append(_Slice(None, None))
            return
        ids = call["input_ids"][0]
        self._slices.append(_Slice(self._spans(call), ids.to("cpu", torch.int32)))

    def _why_unshared(self, call: Mapping[str, Any]) -> str:
        params, ids = call.get("packed_seq_params"), call.get("input_ids")
        if params is None or params.qkv_format != "thd":
            return "it comes without packed_seq_params (qkv_format='thd')"
        if not isinstance(ids, Tensor) or ids.is_nested or ids.dim() != 2 or len(ids) != 1:
            return "its input_ids are not [1, tokens]"
        if getattr(params, "cp_group", None) or getattr(params, "local_cp_size", None):
            return "it has context-parallel ranks of its own"
        for name, value in call.items():
            values = value.values() if isinstance(value, Mapping) else [value]
            if name not in _KNOWN and any(isinstance(v, Tensor) and v.numel() > 1 for v in values):
                return f"the model is also given {name}"
        spans = self._spans(call)
        if any(span < 0 or span % self.layout.sample_alignment for span in spans):
            return f"its samples of {spans} tokens are not cut over cp={self.layout.cp} ranks"
        if not self._has_own_positions(call["position_ids"], spans):
            return "its position_ids do not begin at 0 in each sample"
        return ""

    def _spans(self, call: Mapping[str, Any]) -> tuple[int, ...]:
        params = call["packed_seq_params"]
        ends = params.cu_seqlens_q_padded
        ends = params.cu_seqlens_q if ends is None else ends
        spans = torch.diff(ends).tolist()
        behind = call["input_ids"].numel() * self.layout.cp - sum(spans)
        return tuple(span for span in (*spans, behind) if span)

    def _has_own_positions(self, position_ids: Any, spans: Sequence[int]) -> bool:
        """Whether the embedding sees the positions that it will be given."""
        embedding = getattr(unwrapped(self.chunks[0]), "position_embedding_type", None)
        if embedding != "learned_absolute" or not isinstance(position_ids, Tensor):
            return not isinstance(position_ids, Tensor) or position_ids.dim() <= 2
        own = slice_positions(spans, self.layout.cp, parallel_state.get_context_parallel_rank())
        expected = torch.cat([torch.arange(span) for span in spans])[own]
        return torch.equal(position_ids.flatten().cpu(), expected)

    @property
    def spans(self) -> list[Spans] | None:
        """Those of the rows that were noted; None on ranks that are not asked for ids."""
        if not self._slices or parallel_state.get_tensor_model_parallel_rank():
            return None
        return [own.spans for own in self._slices]

    def agree(self, spans: Sequence[list[Spans] | None], group: Any) -> list[HostRow | None]:
        """The rows of a model replica; a collective of its ranks.

        Args:
            spans: `Sharing.spans` of each rank of the group, in the order of context-parallel
                ranks where they are not None.
            group: of the replica, over gloo; None for one rank.

        Raises:
            ScheduleError: context-parallel ranks have different rows.
        """
        if group is None:
            return self._found([self._ids()])
        holders = [rank for rank, own in enumerate(spans) if own is not None]
        if not holders:
            return []
        if any(spans[rank] != spans[holders[0]] for rank in holders):
            raise ScheduleError(
                "context-parallel ranks have samples of different lengths in one micro-batch; give "
                "all of them the same batches"
            )
        told: list[Any] = [None]
        source, *others = (dist.get_global_rank(group, rank) for rank in holders)
        if dist.get_rank() == source:
            parts = [self._ids()]
            for other in others:
                parts.append(torch.empty_like(parts[0]))
                dist.recv(parts[-1], src=other, group=group)
            try:
                told[0] = self._found(parts)
            except Exception as error:  # raised below, on all ranks
                told[0] = error
        elif dist.get_rank() in others:
            dist.send(self._ids(), dst=source, group=group)
        dist.broadcast_object_list(told, src=source, group=group)
        if isinstance(told[0], Exception):
            raise told[0]
        return told[0]  # type: ignore[no-any-return]

    def _ids(self) -> Tensor:
        own = [part.ids_T for part in self._slices if part.ids_T is not None]
        return torch.cat([torch.empty(0, dtype=torch.int32), *own])

    def _found(self, parts: Sequence[Tensor]) -> list[HostRow | None]:
        """The rows, from the ids of each context-parallel rank."""
        rows: list[HostRow | None] = []
        start = 0
        for spans, _ in self._slices:
            row = None
            if spans is not None:
                end = start + sum(spans) // len(parts)
                ids = torch.cat([part[start:end] for part in parts])
                if len(parts) > 1:
                    ids = ids[assembly_order(spans, len(parts))]
                row = find_host_row(ids.numpy(), spans, self.layout)
                start = end
            rows.append(row)
        return rows

    def shortened(
        self, shapes: Sequence[RowShape], rows: Sequence[HostRow | None]
    ) -> list[RowShape]:
        """The shapes of hidden states, which are those of the shared rows where there are some."""
        gpus = self.layout.cp * (self.layout.tp if self.layout.sequence_parallel else 1)
        pairs = zip(shapes, rows, strict=True)
        return [shape if row is None else (row.tokens // gpus, 1) for shape, row in pairs]


def make_sharing(
    chunks: Sequence[Any], config: Any, lengths: str, is_training: bool
) -> Sharing | None:
    """The sharing of a call, None with a line in the log if no row of it may; see `Sharing`."""
    if reason := why_not_shared(chunks, config, lengths):
        log_once(f"rows of the host share no prefixes: {reason}")
        return None
    return Sharing(chunks, config, is_training)


def log_sharing(kind: str, rows: Sequence[HostRow | None]) -> None:
    """Log once per kind of call what its shared rows save."""
    if kind in _logged:
        return
    _logged.add(kind)
    found = [row for row in rows if row is not None]
    tokens = sum(row.tokens for row in found), sum(row.host_tokens for row in found)
    text = "shared prefixes: %d of %d rows of this %s run %d tokens instead of %d"
    logger.info(text, len(found), len(rows), kind, *tokens)


_logged: set[str] = set()


def why_not_shared(chunks: Sequence[Any], config: Any, lengths: str) -> str:
    """Why no row of a host's call shares prefixes; "" if rows may."""
    if any(not hasattr(unwrapped(chunk), "decoder") for chunk in chunks):
        return f"{type(unwrapped(chunks[0])).__name__} has no decoder"
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return ""
    if lengths != "read":
        return f"lengths={lengths!r} with pipeline stages"
    if not config.variable_seq_lengths:
        return "its pipeline stages exchange rows of one length (variable_seq_lengths=False)"
    return ""


@functools.cache
def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a line the first time that it is said."""
    logger.log(level, "%s", message)
