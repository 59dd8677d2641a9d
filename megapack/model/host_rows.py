"""A host's model on shared rows: hooks on its own call of its chunks.

The host packs an ordinary row and calls its model. On the way in the copies of prefixes are left
out, and all layers run on the shared row; behind the last layer the hidden states of the host's row
are gathered from it, and the backward of the gather adds up the gradients of the copies. The head,
the host's logits and its loss see the row that the host made, and so do routers whose losses or
counts depend on how often a row has a token.

    first stage      before the chunk: its tokens, position ids, and the shared row's description
    all stages       the shared row's description; hidden states of the shared row between stages
    last stage       behind `decoder`: hidden states of the host's row
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megapack.base.arrays import Ints
from megapack.errors import ScheduleError
from megapack.layout import Layout
from megapack.model.attention.packed import packed_seq_params
from megapack.model.attention.rotary import gather_rotary_tables
from megapack.model.attention.row import RowView, with_view
from megapack.model.attention.te_rows import hook_te_attention
from megapack.model.experts.recomputed import RecomputedRows
from megapack.model.head import unwrapped
from megapack.model.recurrent.driven import driving
from megapack.model.replaced import replaced
from megapack.prefixes import HostRow
from megapack.rows.packing import row_position_ids
from megapack.rows.slices import assembly_order, slice_positions
from megapack.rows.transfer import moved


def given_arguments(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name. Tools replace `forward` of a model, so its class is asked."""
    _, *names = inspect.signature(type(unwrapped(model)).forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}


class SharedRows:
    """Runs a host's chunks on shared rows.

        with shared_rows.hooked(is_training=True):
            shared_rows.begin(row, microbatch)      # before each call of the host's forward step
            forward_step(...)

    Args:
        layout: that of the running job.
    """

    def __init__(self, chunks: Sequence[Any], layout: Layout) -> None:
        self._chunks = chunks
        self._layout = layout
        self._row: HostRow | None = None
        self._microbatch = 0
        self._slices: _Slices | None = None

    @contextlib.contextmanager
    def hooked(self, *, is_training: bool) -> Iterator[None]:
        """Within the block the chunks run the rows of `begin`. It is one call of a schedule."""
        gather_rotary_tables(self._chunks)
        hook_te_attention(self._chunks)
        with contextlib.ExitStack() as stack, driving(self._chunks):
            for chunk in map(unwrapped, self._chunks):
                hooks = [chunk.register_forward_pre_hook(self._enter, with_kwargs=True)]
                if chunk.post_process:
                    hooks.append(chunk.decoder.register_forward_hook(self._expand))
                for hook in hooks:
                    stack.callback(hook.remove)
                for router in _routers_of_rows(chunk) if is_training else ():
                    routed = partial(self._routed, router.routing, RecomputedRows())
                    stack.enter_context(replaced(router, routing=routed))
            yield

    def begin(self, row: HostRow | None, microbatch: int) -> None:
        """The next call of a chunk is that of this row; None: it runs as it is."""
        self._row = row
        self._microbatch = microbatch
        self._slices = None

    def _enter(self, chunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row = self._row
        if row is None:
            return None
        if self._slices is not None:
            raise ScheduleError(
                f"the host's forward step calls the model twice for micro-batch "
                f"{self._microbatch}, and its rows are known for one call; set share_prefixes=False"
            )
        given = given_arguments(chunk, args, kwargs)
        device = torch.device(torch.cuda.current_device())
        self._slices = slices = _Slices(row, self._layout, device)
        if chunk.pre_process:
            ids = given["input_ids"]
            if ids.numel() * self._layout.cp != row.host_tokens:
                raise ScheduleError(
                    f"the row of micro-batch {self._microbatch} has {ids.numel()} tokens on this "
                    f"GPU, and had {row.host_tokens // self._layout.cp} when it was read; give "
                    "both calls of the forward step the same batch, or set share_prefixes=False"
                )
            given["input_ids"] = slices.shared_ids(ids[0])[None]
            given["position_ids"] = slices.positions_T[None]
        given["packed_seq_params"] = slices.params()
        return (), given

    def _expand(self, decoder: Any, args: Any, output: Any) -> Any:
        if self._slices is None:
            return None
        if isinstance(output, tuple):
            hidden, *others = output
            return self._slices.to_host(hidden), *others
        return self._slices.to_host(output)

    def _routed(
        self,
        route: Callable[..., tuple[Tensor, Tensor]],
        recomputed: RecomputedRows,
        logits: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """`TopKRouter.routing` on the host's row: logits [t, 1, E] -> probabilities and choices,
        [t, E] each.

        Megatron's balancing losses, its z-loss and its counts for the expert bias treat a row's
        tokens as one set. So the losses are the host's own, and equal logits choose equal experts.
        Then one of each token's copies is taken.
        """
        rows = recomputed.of_call(self._slices)
        if rows is None:
            return route(logits, *args, **kwargs)
        probs, chosen = route(rows.to_host(logits), *args, **kwargs)
        # Not every backend gathers bool.
        return rows.to_shared(probs), rows.to_shared(chosen.to(torch.uint8)).to(chosen.dtype)


def _routers_of_rows(chunk: Any) -> list[Any]:
    """The routers for which it matters how often a row has a token."""
    return [
        router
        for router in chunk.modules()
        if hasattr(router, "routing_type")
        and (
            router.is_aux_loss_enabled()
            or router.config.moe_z_loss_coeff
            or router.enable_expert_bias
            or router.routing_type == "sinkhorn"
        )
    ]


class _Slices:
    """A host's row and its shared row, as they are cut over this rank's groups."""

    def __init__(self, row: HostRow, layout: Layout, device: torch.device) -> None:
        self._row = row
        self._cp = layout.cp
        self._sp = layout.sequence_parallel
        ends = torch.tensor([0, *row.spans]).cumsum(0).to(torch.int32)
        own = slice_positions(row.spans, self._cp, _cp_rank())
        host_index = _sliced(row.to_shared, row.spans, row.host_spans, layout)
        shared_index = _sliced(row.to_host, row.host_spans, row.spans, layout)
        positions_T = row_position_ids(row.branches, row.spans)[own]
        scattered = (self._scattered(index, layout.tp) for index in (host_index, shared_index))
        tensors = (ends, positions_T, shared_index, *scattered)
        self._ends, self.positions_T, self._ids_index, *indices = moved(tensors, device)
        self._host_index, self._shared_index = indices

    def _scattered(self, index_T: Tensor, tp: int) -> Tensor:
        if not self._sp:
            return index_T
        return index_T.chunk(tp)[int(parallel_state.get_tensor_model_parallel_rank())]

    def params(self) -> Any:
        """The description of the shared row, for all layers."""
        row = self._row
        longest = max(*row.host_spans, *row.spans)
        params = packed_seq_params(self._ends, longest, row.tokens, cp=self._cp)
        view = RowView(
            self._ends,
            params.max_seqlen_q,
            lengths=row.spans,
            positions_T=self.positions_T,
            branches=row.branches,
        )
        return with_view(params, view)

    def shared_ids(self, ids_T: Tensor) -> Tensor:
        """Token ids of this rank's slice of the shared row, from its slice of the host's."""
        return self._over_cp(ids_T).index_select(0, self._ids_index)

    def to_host(self, values: Tensor) -> Tensor:
        """Values at this rank's tokens of the host's row, from those of the shared row; the
        backward adds up the gradients of copies."""
        return self._gathered(values).index_select(0, self._host_index)

    def to_shared(self, values: Tensor) -> Tensor:
        """Values at this rank's tokens of the shared row, from those of the host's: of one copy."""
        return self._gathered(values).index_select(0, self._shared_index)

    def _gathered(self, values: Tensor) -> Tensor:
        if self._sp:
            values = gather_from_sequence_parallel_region(values)
        return self._over_cp(values)

    def _over_cp(self, values: Tensor) -> Tensor:
        if self._cp == 1:
            return values
        group = parallel_state.get_context_parallel_group()
        gathered: Tensor = gather_from_sequence_parallel_region(values, group=group)
        return gathered


def _sliced(index: Ints, old: Sequence[int], new: Sequence[int], layout: Layout) -> Tensor:
    """This CP rank's slice of an index from a new whole row into an old one, whose slices of all
    ranks are concatenated."""
    index_T = torch.from_numpy(index)[slice_positions(new, layout.cp, _cp_rank())]
    return index_T if layout.cp == 1 else assembly_order(old, layout.cp)[index_T]


def _cp_rank() -> int:
    return int(parallel_state.get_context_parallel_rank())
