"""Megatron's DDP with communication that overlaps with forwards and backwards.

With `overlap_grad_reduce`, DDP starts the reduction of a bucket in the backward, once all of its
gradients of the step's last micro-batch are there. DDP does not know which micro-batch is the last:
the schedule says so through `config.no_sync_func`. Without that function DDP counts every
micro-batch, and takes the count of the first step for that of all steps.

With `overlap_param_gather` (distributed optimizer), an optimizer step updates each rank's part of
the parameters only. The parts are gathered in the next forward, at the first module that needs
them; until then `param.data` holds old values. DDP takes the first forward after a step to come
after the optimizer step too. `gathering_again` allows one in between.

DDP is made for one step between two calls of `zero_grad_buffer`; `apart_from_earlier` allows more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megapack.model.replaced import replaced


def overlaps_reduction(chunk: Any) -> bool:
    """Whether a chunk's DDP reduces gradients inside backwards."""
    return bool(getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False))


def overlaps_gather(chunk: Any) -> bool:
    """Whether a chunk's DDP gathers parameters inside forwards."""
    return bool(getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False))


def sync_functions(chunks: Sequence[Any], config: Any) -> dict[str, Any]:
    """The functions through which Megatron's schedule controls DDP in a training step.

    Megatron-LM's training loop sets the same functions. What the config already has stays.

    Returns:
        Settings of Megatron's config: `no_sync_func`, and under interleaving the functions that
        start gathers at the same time on all stages, if DDP's config asks for it
        (`align_param_gather`).
    """
    functions: dict[str, Any] = {}
    if any(map(overlaps_reduction, chunks)):
        functions["no_sync_func"] = [chunk.no_sync for chunk in chunks]
    # Only the interleaved schedule calls it; without interleaving each forward starts its gathers.
    if len(chunks) > 1 and any(map(overlaps_gather, chunks)) and _aligns_gathers(chunks):
        functions["param_sync_func"] = [chunk.start_param_sync for chunk in chunks]
    if len(chunks) == 1:
        functions = {name: values[0] for name, values in functions.items()}
    return {name: value for name, value in functions.items() if getattr(config, name) is None}


def _aligns_gathers(chunks: Sequence[Any]) -> bool:
    return all(getattr(chunk.ddp_config, "align_param_gather", False) for chunk in chunks)


def _bucket_groups(chunk: Any) -> list[Any]:
    """The parts of DDP that communicate together; empty for another wrapper."""
    names = ("bucket_groups", "expert_parallel_bucket_groups")
    return [group for name in names for group in getattr(chunk, name, ())]


def finish_param_gathers(chunks: Sequence[Any]) -> None:
    """Gather all parameters now, under `overlap_param_gather`; a collective of all ranks.

    Call it before parameters are read or written outside of a forward: until then `param.data` may
    hold values from before the optimizer's step.

    Args:
        chunks: this rank's chunks in DDP.
    """
    for chunk in chunks:
        if overlaps_gather(chunk):
            for group in _bucket_groups(chunk):
                # Without this test a second call would gather once more.
                if group.param_gather_handle is not None or not group.param_gather_dispatched:
                    group.start_param_sync(force_sync=True)


@contextlib.contextmanager
def gathering_again(chunks: Sequence[Any]) -> Iterator[None]:
    """What forwards in the block gather is gathered again by the next forward after it.

    They may run before the optimizer's step, or after it: DDP cannot tell, and would leave out the
    gather of the new parameters. A gather more overlaps with forwards.
    """
    groups = [group for chunk in filter(overlaps_gather, chunks) for group in _bucket_groups(chunk)]
    waiting = [group for group in groups if not group.param_gather_dispatched]
    yield
    for group in waiting:
        if group.param_gather_handle is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=True)
        group.param_gather_dispatched = False


# Attribute of a bucket group: its counts of gradients after a step. A reset makes new ones.
_COUNTS = "_counts_after_step"


@contextlib.contextmanager
def apart_from_earlier(chunks: Sequence[Any]) -> Iterator[None]:
    """Within the block, which runs a training step, gradient buffers hold that step's alone; then
    those of earlier steps since `zero_grad_buffer` are added.

    Megatron reduces all that the buffers hold. What earlier steps left there is reduced already,
    and would be added up over the ranks again: on two DP ranks, to twice the first step's gradient
    and the second's. Under `overlap_grad_reduce` DDP starts no second reduction before a reset.

    Earlier gradients are copied: as much memory again as the buffers, while the block runs. After
    `zero_grad_buffer` there are none. If the block raises they are lost.
    """
    groups = [group for chunk in chunks for group in _bucket_groups(chunk)]
    kept = []
    for group in groups:
        if _has_earlier(group):
            kept += [(param.main_grad, param.main_grad.clone()) for param in group.params]
            group.reset()
    for gradients, _ in kept:
        gradients.zero_()
    yield
    for gradients, earlier in kept:
        gradients.add_(earlier)
    for group in groups:
        setattr(group, _COUNTS, group.per_param_grad_ready_counts)


def has_earlier_gradients(chunks: Sequence[Any]) -> bool:
    """Whether DDP's buffers hold gradients of a training step since `zero_grad_buffer`."""
    return any(_has_earlier(group) for chunk in chunks for group in _bucket_groups(chunk))


def _has_earlier(group: Any) -> bool:
    return getattr(group, _COUNTS, None) is group.per_param_grad_ready_counts


@contextlib.contextmanager
def dropping_reductions(chunks: Sequence[Any]) -> Iterator[None]:
    """If the block raises, forget the reductions that it started.

    DDP refuses to start a second reduction of a bucket, so a job of one process that skips the
    failed step could not run another one. With several processes, all of them end.
    """
    try:
        yield
    except BaseException:
        for chunk in filter(overlaps_reduction, chunks):
            for group in _bucket_groups(chunk):
                group.grad_reduce_handle = None
        raise


@contextlib.contextmanager
def not_counting(chunks: Sequence[Any]) -> Iterator[None]:
    """Within the block, DDP adds gradients and does not count which ones of a bucket are there."""
    with contextlib.ExitStack() as stack:
        for chunk in filter(overlaps_reduction, chunks):
            stack.enter_context(replaced(chunk.ddp_config, overlap_grad_reduce=False))
        yield
