"""A host's own step on planned shapes: a drop-in for Megatron's `forward_backward_func`.

    forward_backward_func = PlannedSchedule()        # for get_forward_backward_func()
    losses = forward_backward_func(forward_step_func=..., data_iterator=..., model=..., ...)

The host keeps its batches, its forward step, its loss function and its normalization; no weights
are touched. What changes is how stages exchange rows, and how a fault of one rank reaches the
others. The patch `megatron_core` puts it into every framework that asks Megatron for its schedule.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from megapack.base.megatron import frees_while_sending
from megapack.errors import ConfigError, ScheduleError
from megapack.layout import Layout
from megapack.model.attention.mixers import describing_samples
from megapack.model.host_rows import SharedRows
from megapack.model.parameters import gather_norm_outputs
from megapack.prefixes import HostRow
from megapack.ranks.links import Ranks, process_ranks
from megapack.schedule import checks
from megapack.schedule.between_steps import clear_gradients
from megapack.schedule.faults import FiniteFlags
from megapack.schedule.host_calls import (
    Lengths,
    NonFinite,
    check_equal_counts,
    check_options,
    meets_in_every_microbatch,
    why_not_planned,
)
from megapack.schedule.listeners import Listeners, PlaceKeeper
from megapack.schedule.megatron_call import MegatronCall
from megapack.schedule.reading import Keeping, RowShape, common_shapes, read_row_shapes
from megapack.schedule.row_groups import replica_group
from megapack.schedule.runner import process_groups
from megapack.schedule.sharing import (
    Sharing,
    Spans,
    check_all_share,
    log_once,
    log_sharing,
    make_sharing,
)

logger = logging.getLogger(__name__)


class PlannedSchedule:
    """Megatron's schedule for a host's own step, with planned shapes and errors on all ranks.

    Call it like the function that Megatron's `get_forward_backward_func()` returns, on all ranks of
    the default process group together. For each call:

    1. The lengths of this rank's rows are read from the host's batches (`reading`), if the config
       says that they differ (`variable_seq_lengths`) and the model has several stages.
    2. The ranks agree: all make the same call, the ranks of one pipeline have the same M and row
       lengths, and M is one that Megatron runs. A difference raises on every rank.
    3. Megatron's schedule runs with planned shapes instead of an exchange of shapes per tensor,
       and with settings under which interleaved stages do not confuse tensors.
    4. A NaN is reported with its rank and micro-batch. An error of one rank, or its death, is
       raised on all ranks; late calls are logged (`ranks.watchdog`).

    With `share_prefixes`, token ids are read too: layers run on rows that hold the common
    beginnings of their samples once (`sharing`). The host's logits, loss and outputs see the rows
    that it made.

    What a host's loop leaves in `param.grad` does not count in a step (`between_steps`).

    Where a packed row does not tell Megatron's Mamba layers its samples, the call does, and warns
    (`mixers.describing_samples`).

    Args:
        schedule: the function to run; None asks Megatron for it at each call.
        lengths: "exchange" leaves the exchange of shapes to Megatron: for a model that changes the
            number of tokens between its inputs and its hidden states, such as one with images.
        non_finite: "warn" logs where a NaN began and leaves the rest to the host; "error" raises on
            every rank; "ignore" does not look.
        share_prefixes: whether samples of a row share their common beginnings.
        ranks: see `ScheduleAdapter`.
        keeping: see `read_row_shapes`.
    """

    def __init__(
        self,
        schedule: Callable[..., Any] | None = None,
        *,
        lengths: Lengths = "read",
        non_finite: NonFinite = "warn",
        share_prefixes: bool = False,
        ranks: Ranks | None = None,
        keeping: Keeping = contextlib.nullcontext,
    ) -> None:
        check_options(lengths, non_finite)
        self.schedule = schedule
        self.lengths = lengths
        self.non_finite = non_finite
        self.share_prefixes = share_prefixes
        self.ranks = ranks
        self.keeping = keeping

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        forward_only: bool = False,
        **others: Any,
    ) -> Any:
        """Run Megatron's schedule; takes and returns what that takes and returns.

        Raises:
            ConfigError: Megatron does not run this M, or the model does not run shared prefixes; on
                every rank.
            ScheduleError: ranks differ in the call, M or row lengths; a NaN under
                `non_finite="error"`. On every rank.
            RankError: on every rank, if one failed or ended inside the call. The process groups
                cannot be used any more.
        """
        checks.warn_of_newer_version()
        chunks = list(model) if isinstance(model, Sequence) else [model]
        schedule = self.schedule or get_forward_backward_func()
        ranks = process_ranks() if self.ranks is None else self.ranks
        kind = "forward pass" if forward_only else "step"
        # Frameworks describe rows without what Megatron's Mamba layers read.
        with ranks.guarded(_next_name(kind)), describing_samples():
            config = get_model_config(chunks[0])
            if not forward_only:
                clear_gradients(chunks)
            # Only there a norm's output is gathered; each step would walk all modules else.
            if getattr(config, "sequence_parallel", False):
                gather_norm_outputs(chunks)
            if reason := why_not_planned(config, others):
                log_once(f"this {kind} runs on Megatron's own schedule: {reason}")
            else:
                run = _Run(self, ranks, forward_step_func, chunks, num_microbatches, kind)
                schedule = functools.partial(run.run, schedule)
            return schedule(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                **others,
            )


class _Report(NamedTuple):
    """What a rank tells the other ranks of its model replica."""

    is_fine: bool
    num_microbatches: int
    cp_rank: int
    shapes: list[RowShape | None]
    shares: bool
    spans: list[Spans] | None
    """See `Sharing.spans`."""


class _Run:
    """One call on this rank.

    Args:
        options: the schedule that is called.
        kind: the call in errors and logs.
    """

    def __init__(
        self,
        options: PlannedSchedule,
        ranks: Ranks,
        forward_step_func: Callable[..., Any],
        chunks: list[Any],
        num_microbatches: int,
        kind: str,
    ) -> None:
        self._options = options
        self._ranks = ranks
        self._forward_step_func = forward_step_func
        self._chunks = chunks
        self._num_microbatches = num_microbatches
        self._kind = kind
        self._is_training = kind == "step"
        self._config = config = get_model_config(chunks[0])
        self._pp = parallel_state.get_pipeline_model_parallel_world_size()
        self._tp: int = parallel_state.get_tensor_model_parallel_world_size()
        self._cp: int = parallel_state.get_context_parallel_world_size()
        self._group_size = config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else None
        self._device = torch.device(torch.cuda.current_device())
        self._reads = (
            options.lengths == "read" and self._pp > 1 and bool(config.variable_seq_lengths)
        )
        self._shapes: list[RowShape] | None = None
        self._sharing: Sharing | None = None
        if options.share_prefixes:
            self._sharing = make_sharing(chunks, config, options.lengths, self._is_training)
        self._shared_rows: SharedRows | None = None
        self._rows: list[HostRow | None] = []
        self._num_forwards = [0] * len(chunks)
        looks = options.non_finite != "ignore"
        self._flags = FiniteFlags.of_rank(
            len(chunks),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_data_parallel_rank(),
            reads_gradients=looks and not config.fp16,
        )
        # The flags read every output.
        self._listeners = Listeners([PlaceKeeper(ranks.place), *([self._flags] if looks else [])])

    def run(
        self,
        schedule: Callable[..., Any],
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        **arguments: Any,
    ) -> Any:
        """Read, agree, and run Megatron's schedule."""
        data_iterator = self._agree(data_iterator)
        self._ranks.place.enter("schedule")
        given = arguments.get("p2p_communicator")
        groups = process_groups() if given is None else arguments["pg_collection"]
        megatron = MegatronCall(
            chunks=self._chunks,
            config=self._config,
            pp_group=groups.pp if given is None else given.pp_group,
            place=self._ranks.place,
            flags=self._flags,
            is_training=self._is_training,
            group_size=self._group_size,
        )
        communicator = None
        if self._pp > 1:
            communicator = megatron.communicator(self._shapes)
            arguments |= {"p2p_communicator": communicator, "pg_collection": groups}
        with (
            megatron.running(
                variable=bool(self._config.variable_seq_lengths),
                # Where the host's setting is safe, keeping outputs would only take memory.
                keeps_outputs=frees_while_sending(megatron_version),
                finalize=self._config.finalize_model_grads_func,
                **self._interleaving(),
            ),
            self._on_shared_rows(),
        ):
            result = schedule(
                forward_step_func=self._forward_step(), data_iterator=data_iterator, **arguments
            )
        self._ranks.place.enter("output")
        if communicator is not None:
            communicator.check_received()
        self._report_non_finite()
        return result

    def _interleaving(self) -> dict[str, Any]:
        """Settings without which interleaved stages take one tensor for another, see
        docs/hosts/megatron_lm.md."""
        if len(self._chunks) == 1:
            return {}
        settings = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        frees = {"deallocate_pipeline_outputs": False}
        _warn_of(self._config, settings | (frees if frees_while_sending(megatron_version) else {}))
        return settings

    def _agree(self, data_iterator: Any) -> Any:
        """Agree with all ranks on the call, M and row shapes; returns the iterators to run with."""
        self._ranks.place.enter("pack")
        read: list[RowShape | None] = []
        error: Exception | None = None
        try:
            self._check_count()
            if self._sharing is not None:
                self._sharing.check()
            if self._reads or self._sharing is not None:
                read, data_iterator = read_row_shapes(
                    self._forward_step_func,
                    data_iterator,
                    self._chunks,
                    self._num_microbatches,
                    sequence_shards=self._sequence_shards,
                    keeping=self._options.keeping,
                    note=None if self._sharing is None else self._sharing.note,
                    watch=None if self._sharing is None else self._sharing.watch,
                )
        except Exception as caught:
            # Other ranks may wait for this one inside the forward step, as in Megatron-LM's
            # broadcast of a batch to tensor-parallel ranks. Then only the watchdog reaches them.
            if self._tp * self._cp > 1 and not isinstance(caught, ConfigError):
                raise
            error = caught  # raised below, on all ranks
        group = replica_group() if self._tp * self._pp * self._cp > 1 else None
        agreement = self._ranks.prepare(
            lambda: self._agree_in_replica(read, error, group), self._same
        )
        self._shapes, self._rows = agreement.result()
        if self._reads and self._shapes is None:
            log_once(
                "row lengths are exchanged by Megatron: the host's forward step calls the model "
                "without input_ids [batch size, tokens]"
            )
        return data_iterator

    def _check_count(self) -> None:
        """Raise ConfigError for an M that Megatron does not run."""
        count, vpp, group = self._num_microbatches, len(self._chunks), self._group_size
        layout = Layout(pp=self._pp, vpp=vpp, microbatch_group_size=group)
        if count < 1 or not layout.is_legal_count(count):
            raise ConfigError(
                f"M={count} micro-batches cannot run with pp={self._pp}, vpp={vpp}, G={group}; "
                "Megatron wants at least 1, and with vpp > 1 at least G, where M % G is 0 or at "
                f"least pp: the next count is {layout.next_legal_count(max(count, 1))}"
            )

    @property
    def _sequence_shards(self) -> int:
        return self._tp if self._config.sequence_parallel else 1

    def _same(self) -> Mapping[str, str]:
        """Values that must be equal on all ranks."""
        meets = meets_in_every_microbatch(self._config, self._chunks)
        names = ("lengths", "non_finite", "share_prefixes")
        return {
            "call": f"{self._kind}, {len(self._chunks)} chunk(s)",
            "M": str(self._num_microbatches) if meets else "",
            "settings": ", ".join(f"{name}={getattr(self._options, name)}" for name in names),
        }

    def _agree_in_replica(
        self, read: Sequence[RowShape | None], error: Exception | None, group: Any
    ) -> tuple[list[RowShape] | None, list[HostRow | None]]:
        """The row shapes of this model replica, None if they are not known, and the rows whose
        samples share prefixes."""
        cp_rank = parallel_state.get_context_parallel_rank()
        sharing = self._sharing
        own = _Report(
            is_fine=error is None,
            num_microbatches=self._num_microbatches,
            cp_rank=cp_rank,
            shapes=list(read),
            shares=sharing is not None,
            spans=None if sharing is None else sharing.spans,
        )
        reports = [own]
        if group is not None:
            reports *= dist.get_world_size(group)
            dist.all_gather_object(reports, own, group=group)
        # Raised after the exchange: the other ranks of the replica wait in it. The agreement of all
        # ranks, which runs this, shows the error to them.
        if error is not None:
            raise error
        fine = [report for report in reports if report.is_fine]
        check_equal_counts([report.num_microbatches for report in fine])
        check_all_share([report.shares for report in fine])
        shapes = None
        if self._reads:
            shapes = common_shapes([r.shapes for r in fine if r.cp_rank == cp_rank])
        if sharing is None or not all(report.is_fine for report in reports):
            return shapes, []
        rows = sharing.agree([report.spans for report in reports], group)
        if shapes is not None:
            shapes = sharing.shortened(shapes, rows)
        return shapes, rows

    def _on_shared_rows(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, rows that share prefixes run without the copies of them."""
        if self._sharing is None or not any(self._rows):
            return contextlib.nullcontext()
        log_sharing(self._kind, self._rows)
        self._shared_rows = SharedRows(self._chunks, self._sharing.layout)
        return self._shared_rows.hooked(is_training=self._is_training)

    def _forward_step(self) -> Callable[..., Any]:
        """The host's forward step, which also calls the listeners."""
        forward_step_func = self._forward_step_func

        @functools.wraps(forward_step_func)
        def forward_step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            chunk = self._index_of(model)
            # Each chunk runs the micro-batches in their order.
            microbatch = self._num_forwards[chunk]
            self._num_forwards[chunk] += 1
            self._listeners.begin("F", chunk, microbatch)
            if self._shared_rows is not None:
                self._shared_rows.begin(self._rows[microbatch], microbatch)
            output, loss_func = forward_step_func(data_iterator, model, *args, **kwargs)
            if self._is_last(chunk):
                return output, self._with_listeners(loss_func, chunk, microbatch)
            self._check_shape(output, chunk, microbatch)
            self._listeners.end_forward(chunk, microbatch, output)
            return output, loss_func

        return forward_step

    def _index_of(self, model: Any) -> int:
        for chunk, own in enumerate(self._chunks):
            if own is model:
                return chunk
        raise ScheduleError(
            f"the schedule runs a {type(model).__name__} that is not one of this call's "
            f"{len(self._chunks)} chunk(s); give it the model that it runs"
        )

    def _is_last(self, chunk: int) -> bool:
        """Whether a chunk is the model's last one, for which Megatron calls the loss function."""
        is_last_stage = parallel_state.get_pipeline_model_parallel_rank() == self._pp - 1
        return is_last_stage and chunk == len(self._chunks) - 1

    def _with_listeners(self, loss_func: Any, chunk: int, microbatch: int) -> Any:
        """The host's loss function; the forward of the last chunk ends with it."""
        if loss_func is None:
            return None

        @functools.wraps(loss_func)
        def loss(*args: Any, **kwargs: Any) -> Any:
            result = loss_func(*args, **kwargs)
            value = result[0] if isinstance(result, tuple) else None
            if isinstance(value, Tensor) and value.numel() == 1:
                self._listeners.end_forward(chunk, microbatch, value)
            return result

        return loss

    def _check_shape(self, output: Any, chunk: int, microbatch: int) -> None:
        if self._shapes is None or not isinstance(output, Tensor):
            return
        planned = self._shapes[microbatch]
        found = tuple(output.shape[:2])
        if found != planned:
            raise ScheduleError(
                f"hidden states of micro-batch {microbatch} on chunk {chunk} have (tokens, batch "
                f"size) {found}, its input_ids give {planned}; set lengths='exchange' "
                "(megapack.hosts.megatron_core.configure) for models that add or remove tokens"
            )

    def _report_non_finite(self) -> None:
        if self._options.non_finite == "ignore":
            return
        report = self._flags.refuse if self._options.non_finite == "error" else self._flags.warn
        report(self._describe, device=self._device)

    def _describe(self, microbatch: int) -> str:
        if self._shapes is None:
            return f"{microbatch + 1} of {self._num_microbatches}"
        tokens, batch_size = self._shapes[microbatch]
        return f"{tokens * self._sequence_shards * batch_size} tokens on this GPU"


_counts: dict[str, int] = {}


def _next_name(kind: str) -> str:
    """The name of the next call of this kind: "step 3"."""
    _counts[kind] = _counts.get(kind, 0) + 1
    return f"{kind} {_counts[kind]}"


def _warn_of(config: Any, settings: Mapping[str, Any]) -> None:
    """Warn once of the host's settings that give wrong gradients or hang under interleaving."""
    names = ("overlap_p2p_comm", "batch_p2p_comm", "deallocate_pipeline_outputs")
    wrong = [n for n in names if n in settings and getattr(config, n) != settings[n]]
    if wrong:
        _warn_once(
            f"{', '.join(f'{name}={getattr(config, name)}' for name in wrong)} can give wrong "
            "gradients or hang with virtual pipeline stages; the call runs with "
            f"{', '.join(f'{name}={settings[name]}' for name in wrong)}"
        )


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
