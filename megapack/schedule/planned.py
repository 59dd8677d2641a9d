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
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
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
from megapack.schedule.faults import FiniteFlags, stages_of
from megapack.schedule.listeners import Listeners, PlaceKeeper
from megapack.schedule.megatron_call import MegatronCall
from megapack.schedule.p2p import width_between_stages
from megapack.schedule.reading import Keeping, common_shapes, read_row_shapes
from megapack.schedule.row_groups import replica_group
from megapack.schedule.runner import process_groups
from megapack.schedule.sharing import RowShape, Sharing, Spans, log_once, log_sharing, make_sharing

Lengths = Literal["read", "exchange"]
"""Where row lengths come from: the host's batches, or Megatron's exchange of shapes."""
NonFinite = Literal["warn", "error", "ignore"]
"""What happens on a NaN or an infinity in hidden states, losses or gradients."""

# Settings of Megatron's config under which its schedule takes other forward steps or sends other
# tensors than these calls can follow.
_OTHER_SCHEDULES = ("overlap_moe_expert_parallel_comm", "hybrid_context_parallel")


@dataclass(eq=False)
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
    """

    schedule: Callable[..., Any] | None = None
    """The function to run; None asks Megatron for it at each call."""
    _: KW_ONLY
    lengths: Lengths = "read"
    """With "exchange" Megatron exchanges shapes: for a model that changes the number of tokens
    between its inputs and its hidden states, such as one with images."""
    non_finite: NonFinite = "warn"
    """A NaN: "warn" logs where it began and leaves the rest to the host; "error" raises on every
    rank; "ignore" does not look."""
    share_prefixes: bool = False
    """Whether samples of a row share their common beginnings."""
    ranks: Ranks | None = None
    """See `ScheduleAdapter`."""
    keeping: Keeping = contextlib.nullcontext
    """See `read_row_shapes`."""

    def __post_init__(self) -> None:
        check_options(self.lengths, self.non_finite)

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


@dataclass(eq=False)
class _Run:
    """One call on this rank."""

    options: PlannedSchedule
    """The schedule that is called."""
    ranks: Ranks
    forward_step_func: Callable[..., Any]
    chunks: list[Any]
    num_microbatches: int
    kind: str
    """The call in errors and logs."""

    def __post_init__(self) -> None:
        chunks, options = self.chunks, self.options
        self._is_training = self.kind == "step"
        self._config = config = get_model_config(chunks[0])
        self._pp: int = parallel_state.get_pipeline_model_parallel_world_size()
        self._tp: int = parallel_state.get_tensor_model_parallel_world_size()
        self._cp: int = parallel_state.get_context_parallel_world_size()
        self._sequence_shards = self._tp if config.sequence_parallel else 1
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
        self._flags = FiniteFlags(
            stages_of(parallel_state.get_pipeline_model_parallel_group(), len(chunks)),
            parallel_state.get_data_parallel_rank(),
            reads_gradients=looks and not config.fp16,
        )
        # The flags read every output.
        listeners = [PlaceKeeper(self.ranks.place), *([self._flags] if looks else [])]
        self._listeners = Listeners(listeners)

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
        self.ranks.place.enter("schedule")
        given = arguments.get("p2p_communicator")
        groups = process_groups() if given is None else arguments["pg_collection"]
        megatron = MegatronCall(
            chunks=self.chunks,
            config=self._config,
            pp_group=groups.pp if given is None else given.pp_group,
            place=self.ranks.place,
            flags=self._flags,
            is_training=self._is_training,
            group_size=self._group_size,
        )
        if len(self.chunks) > 1:
            _warn_of(self._config)
        with (
            megatron.running(
                variable=bool(self._config.variable_seq_lengths),
                # Where the host's setting is safe, keeping outputs would only take memory.
                keeps_outputs=frees_while_sending(megatron_version),
                finalize=self._config.finalize_model_grads_func,
            ),
            self._on_shared_rows(),
        ):
            result = megatron.run(
                schedule,
                self._shapes,
                groups,
                forward_step_func=self._forward_step(),
                data_iterator=data_iterator,
                **arguments,
            )
        self.ranks.place.enter("output")
        if self.options.non_finite != "ignore":
            report = self._flags.refuse if self.options.non_finite == "error" else self._flags.warn
            report(self._describe, device=self._device)
        return result

    def _agree(self, data_iterator: Any) -> Any:
        """Agree with all ranks on the call, M and row shapes; returns the iterators to run with."""
        self.ranks.place.enter("pack")
        read: list[RowShape | None] = []
        error: Exception | None = None
        try:
            self._check_count()
            if self._sharing is not None:
                self._sharing.check()
            if self._reads or self._sharing is not None:
                read, data_iterator = read_row_shapes(
                    self.forward_step_func,
                    data_iterator,
                    self.chunks,
                    self.num_microbatches,
                    sequence_shards=self._sequence_shards,
                    keeping=self.options.keeping,
                    sharing=self._sharing,
                )
        except Exception as caught:
            # Other ranks may wait for this one inside the forward step, as in Megatron-LM's
            # broadcast of a batch to tensor-parallel ranks. Then only the watchdog reaches them.
            if self._tp * self._cp > 1 and not isinstance(caught, ConfigError):
                raise
            error = caught  # raised below, on all ranks
        group = replica_group() if self._tp * self._pp * self._cp > 1 else None
        agreement = self.ranks.prepare(
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
        count, vpp, group = self.num_microbatches, len(self.chunks), self._group_size
        layout = Layout(pp=self._pp, vpp=vpp, microbatch_group_size=group)
        if count < 1 or not layout.is_legal_count(count):
            raise ConfigError(
                f"M={count} micro-batches cannot run with pp={self._pp}, vpp={vpp}, G={group}; "
                "Megatron wants at least 1, and with vpp > 1 at least G, where M % G is 0 or at "
                f"least pp: the next count is {layout.next_legal_count(max(count, 1))}"
            )

    def _same(self) -> Mapping[str, str]:
        """Values that must be equal on all ranks."""
        meets = checks.meets_in_every_microbatch(self._config, self.chunks)
        names = ("lengths", "non_finite", "share_prefixes")
        return {
            "call": f"{self.kind}, {len(self.chunks)} chunk(s)",
            "M": str(self.num_microbatches) if meets else "",
            "settings": ", ".join(f"{name}={getattr(self.options, name)}" for name in names),
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
            num_microbatches=self.num_microbatches,
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
        counts = {report.num_microbatches for report in fine}
        if len(counts) > 1:
            raise ScheduleError(
                f"the ranks of one pipeline have M={min(counts)} and M={max(counts)} "
                "micro-batches; give all of them the same batches"
            )
        if len({report.shares for report in fine}) > 1:
            raise ScheduleError(
                "share_prefixes differs between ranks; set it (MEGAPACK_SHARE_PREFIXES) on all"
            )
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
        log_sharing(self.kind, self._rows)
        self._shared_rows = SharedRows(self.chunks, self._sharing.layout)
        return self._shared_rows.hooked(is_training=self._is_training)

    def _forward_step(self) -> Callable[..., Any]:
        """The host's forward step, which also calls the listeners."""
        forward_step_func = self.forward_step_func
        is_last_stage = parallel_state.get_pipeline_model_parallel_rank() == self._pp - 1

        @functools.wraps(forward_step_func)
        def forward_step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            chunk = next(i for i, own in enumerate(self.chunks) if own is model)
            # Each chunk runs the micro-batches in their order.
            microbatch = self._num_forwards[chunk]
            self._num_forwards[chunk] += 1
            self._listeners.begin("F", chunk, microbatch)
            if self._shared_rows is not None:
                self._shared_rows.begin(self._rows[microbatch], microbatch)
            output, loss_func = forward_step_func(data_iterator, model, *args, **kwargs)
            # On the model's last chunk Megatron calls the loss function.
            if is_last_stage and chunk == len(self.chunks) - 1:
                return output, self._with_listeners(loss_func, chunk, microbatch)
            self._check_shape(output, chunk, microbatch)
            self._listeners.end_forward(chunk, microbatch, output)
            return output, loss_func

        return forward_step

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
        planned = (*self._shapes[microbatch], width_between_stages(self._config))
        found = tuple(output.shape)
        if found != planned:
            raise ScheduleError(
                f"hidden states of micro-batch {microbatch} on chunk {chunk} have (tokens, batch "
                f"size, width) {found}, its input_ids and config give {planned}; set "
                "lengths='exchange' (megapack.hosts.megatron_core.configure) for such models"
            )

    def _describe(self, microbatch: int) -> str:
        if self._shapes is None:
            return f"{microbatch + 1} of {self.num_microbatches}"
        tokens, batch_size = self._shapes[microbatch]
        return f"{tokens * self._sequence_shards * batch_size} tokens on this GPU"


def why_not_planned(config: Any, others: Mapping[str, Any]) -> str:
    """Why a call of a host runs on Megatron's own schedule; "" if it is planned.

    Args:
        others: the call's arguments that `PlannedSchedule` does not name.
    """
    if not parallel_state.model_parallel_is_initialized():
        return "Megatron's global process groups are not set up"
    for name in _OTHER_SCHEDULES:
        if getattr(config, name, False):
            return f"config.{name} is set, which takes another forward step"
    if checks.captures_whole_iterations(config):
        return "CUDA graphs of whole iterations replay it without its Python code"
    if others.get("adjust_tensor_shapes_fn") is not None:
        return "its caller passes adjust_tensor_shapes_fn"
    communicator = others.get("p2p_communicator")
    if communicator is not None and type(communicator) is not P2PCommunicator:
        return f"its caller passes a {type(communicator).__name__}"
    has_stages = parallel_state.get_pipeline_model_parallel_world_size() > 1
    if has_stages and (communicator is None) != (others.get("pg_collection") is None):
        return "its caller passes one of p2p_communicator and pg_collection"
    return ""


def check_options(lengths: str, non_finite: str) -> None:
    """Raise ConfigError for unknown options of a `PlannedSchedule`."""
    kinds = {"lengths": (lengths, Lengths), "non_finite": (non_finite, NonFinite)}
    for name, (value, kind) in kinds.items():
        if value not in get_args(kind):
            raise ConfigError(f"{name}={value!r}; set one of {', '.join(get_args(kind))}")


_counts: dict[str, int] = {}


def _next_name(kind: str) -> str:
    """The name of the next call of this kind: "step 3"."""
    _counts[kind] = _counts.get(kind, 0) + 1
    return f"{kind} {_counts[kind]}"


def _warn_of(config: Any) -> None:
    """Warn once of the host's settings under which interleaved stages take one tensor for another,
    see docs/maintainers/patching.md."""
    settings = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if frees_while_sending(megatron_version):
        settings["deallocate_pipeline_outputs"] = False
    wrong = [name for name, value in settings.items() if getattr(config, name) != value]
    if wrong:
        log_once(
            f"{', '.join(f'{name}={getattr(config, name)}' for name in wrong)} can give wrong "
            "gradients or hang with virtual pipeline stages; the call runs with "
            f"{', '.join(f'{name}={settings[name]}' for name in wrong)}",
            logging.WARNING,
        )
