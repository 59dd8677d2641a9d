"""The shapes of a host's rows, read from its own batches before its schedule runs.

A stage must know the length of a row before it can receive it, and the host's forward step is where
the length becomes known: it draws a batch, pads and slices it, and calls the model. So the forward
step is called once per micro-batch on shallow copies of the batches, and left when it calls the
model. The stage that has the embedding does so; the others are told.

    shapes, iterators = read_row_shapes(forward_step_func, data_iterator, chunks, 8, ...)
    shapes[3]          # (tokens, batch size) of micro-batch 3, or None if it is not known here

Afterwards the host's iterators give the same batches again. What a forward step does before it
calls the model happens twice. Environment variables and routing replays that it sets are restored,
and so is the state that `keeping` names.
"""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.parallel_state import get_context_parallel_world_size as cp_size
from megatron.core.utils import StragglerDetector
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from megapack.errors import ScheduleError
from megapack.model.host_rows import given_arguments
from megapack.schedule.sharing import RowShape, Sharing

Keeping = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes a context that keeps a framework's state over the reading."""


class _Left(BaseException):
    """The forward step was left at its call of the model.

    Args:
        call: the arguments by name; empty for a call of another model.
    """

    def __init__(self, call: Mapping[str, Any]) -> None:
        super().__init__()
        self.call = call


class ReplayedIterator:
    """An iterator that is read ahead, and then gives its items from the first one on again.

    Reading gives shallow copies: a forward step may remove keys from a batch.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._items: list[Any] = []
        self.is_reading = True

    def __iter__(self) -> ReplayedIterator:
        return self

    def __next__(self) -> Any:
        if self.is_reading:
            self._items.append(next(self._iterator))
            return copy.copy(self._items[-1])
        return self._items.pop(0) if self._items else next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        # Hosts ask their iterators for more than items. A copy has no attributes yet.
        if name.startswith("__") or name == "_iterator":
            raise AttributeError(name)
        return getattr(self._iterator, name)


def read_row_shapes(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    chunks: Sequence[torch.nn.Module],
    num_microbatches: int,
    *,
    sequence_shards: int,
    keeping: Keeping = contextlib.nullcontext,
    sharing: Sharing | None = None,
) -> tuple[list[RowShape | None], Any]:
    """The shapes of this rank's rows, and the iterators to run with.

    Args:
        data_iterator: the host's, or a list with one per chunk. A plain iterator is read ahead; an
            object with a position of its own (slime's `get_next`) is copied.
        sequence_shards: GPUs that hidden states are sliced over, and ids are not: tp under sequence
            parallelism.
        keeping: a context that restores at its end what the forward step sets before the model.
        sharing: gets the arguments of each call of the model, and watches within it.

    Returns:
        A shape per micro-batch, None where the forward step does not give the model `input_ids` and
        on stages without an embedding; and `data_iterator` or its replacement.
    """
    wrappers = _wrappers(chunks[0])
    # Later stages ignore the ids, so that hosts may leave them as they were before packing there:
    # SkyRL gives two samples of 64 positions, [2, 64], for a row of 86 tokens, [1, 86].
    if not getattr(wrappers[-1], "pre_process", True):
        return [None] * num_microbatches, data_iterator
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    own = iterators[0]
    replayed = ReplayedIterator(own) if hasattr(own, "__next__") else None
    reader = copy.copy(own) if replayed is None else replayed
    shapes = []
    with torch.no_grad(), _leaving(wrappers, sharing), _same_state(chunks), keeping():
        for _ in range(num_microbatches):
            call = _model_call(forward_step_func, reader, chunks[0])
            shapes.append(_row_shape(call, sequence_shards))
            if sharing is not None:
                sharing.note(call)
    if replayed is not None:
        replayed.is_reading = False
        iterators = [replayed, *iterators[1:]]
    return shapes, iterators if isinstance(data_iterator, list) else iterators[0]


def _model_call(
    forward_step_func: Callable[..., Any], reader: Any, chunk: Any
) -> Mapping[str, Any]:
    try:
        forward_step_func(reader, chunk)
    except _Left as left:
        return left.call
    return {}


def _wrappers(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """The chunk, what it wraps, and so on to the model itself."""
    wrappers = [chunk]
    while isinstance(inner := getattr(wrappers[-1], "module", None), torch.nn.Module):
        wrappers.append(inner)
    return wrappers


@contextlib.contextmanager
def _leaving(wrappers: Sequence[torch.nn.Module], sharing: Sharing | None) -> Iterator[None]:
    """Within the block, a call of one of the modules, or of another model, raises `_Left`."""

    def leave(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if sharing is not None:
            sharing.watch()
        raise _Left(given_arguments(wrappers[-1], args, kwargs))

    def leave_at_another(module: Any, _: Any) -> None:
        # A reference model, whose forward must not run for a length: ms-swift's DPO calls it
        # first, and sends its hidden states and the policy's in one tensor.
        if hasattr(module, "pre_process") and module not in wrappers:
            raise _Left({})

    # First of all hooks: DDP's own start to gather parameters.
    hooks = [
        module.register_forward_pre_hook(leave, prepend=True, with_kwargs=True)
        for module in wrappers
    ]
    hooks.append(register_module_forward_pre_hook(leave_at_another))
    try:
        with _quiet_detector():
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _quiet_detector() -> Iterator[None]:
    """Within the block, Megatron's detector of stragglers does not log `_Left` as an error.

    Hosts call the model inside it. It logs the traceback of every exception, even if it is off.
    """
    leave_detector = StragglerDetector.__exit__

    def quiet(self: Any, kind: Any, value: Any, trace: Any) -> Any:
        is_left = kind is _Left
        return leave_detector(self, *((None,) * 3 if is_left else (kind, value, trace)))

    StragglerDetector.__exit__ = quiet
    try:
        yield
    finally:
        StragglerDetector.__exit__ = leave_detector


@contextlib.contextmanager
def _same_state(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Keep what forward steps set before the model for a replay of routing.

    slime keeps the stage of a replay in an environment variable, which it resets after the model.
    Megatron's routers note the experts of each micro-batch for its backward in a list.
    """
    environment = dict(os.environ)
    routers = (router for chunk in chunks for router in _routers(chunk))
    replays = [replay for m in routers if (replay := vars(m)["router_replay"]) is not None]
    notes = [
        {k: list(v) if isinstance(v, list) else v for k, v in vars(r).items()} for r in replays
    ]
    try:
        yield
    finally:
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        for replay, before in zip(replays, notes, strict=True):
            vars(replay).update(before)


def _routers(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """The chunk's modules that may replay their routing. All modules are searched for them once."""
    if chunk not in _known_routers:
        # `vars`: torch looks for a missing attribute in three more places of each module.
        _known_routers[chunk] = [m for m in chunk.modules() if "router_replay" in vars(m)]
    return _known_routers[chunk]


# Megatron's routers have the attribute from their construction on.
_known_routers: weakref.WeakKeyDictionary[torch.nn.Module, list[torch.nn.Module]]
_known_routers = weakref.WeakKeyDictionary()


def _row_shape(call: Mapping[str, Any], sequence_shards: int) -> RowShape | None:
    """(tokens, batch size) of hidden states, from the model's ids [batch size, tokens]."""
    input_ids = call.get("input_ids")
    # verl's nested tensor of samples is packed inside the model's call.
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_nested:
        return None
    bounds = getattr(call.get("packed_seq_params"), "cu_seqlens_q_padded", None)
    if len(input_ids) > 1 and bounds is not None:
        # So are its padded samples for models with images.
        return int(bounds[-1]) // cp_size() // sequence_shards, 1
    return input_ids.shape[1] // sequence_shards, len(input_ids)


def common_shapes(reports: Sequence[Sequence[RowShape | None]]) -> list[RowShape] | None:
    """The shape of each micro-batch, from what the ranks of a model replica have read.

    >>> common_shapes([[(8, 1), (6, 1)], [None, None]])
    [(8, 1), (6, 1)]

    Returns:
        None if no rank knows the shape of one of them.

    Raises:
        ScheduleError: ranks have read different shapes of one micro-batch.
    """
    common: list[RowShape] = []
    for microbatch, shapes in enumerate(zip(*reports, strict=True)):
        known = sorted({shape for shape in shapes if shape is not None})
        if not known:
            return None
        if len(known) > 1:
            raise ScheduleError(
                f"the ranks of one pipeline have read (tokens, batch size) {known[0]} and "
                f"{known[-1]} of micro-batch {microbatch}; give all of them the same batches"
            )
        common += known
    return common
