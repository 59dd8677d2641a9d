"""Process groups over gloo where a recipe asks for NCCL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def over_gloo(make_group: Callable[..., Any]) -> Callable[..., Any]:
    """`init_process_group` or `new_group`, with gloo where NCCL is asked for.

    gloo also serves "cpu:gloo,cuda:nccl". NCCL's options and a device go with NCCL.
    """

    @functools.wraps(make_group)
    def make(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if _names_nccl(value) else value for value in args)
        if _names_nccl(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
            kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        return make_group(*args, **kwargs)

    return make


def _names_nccl(value: Any) -> bool:
    return isinstance(value, str) and "nccl" in value.lower()


def padded_all_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """`all_gather` that also takes parts of different lengths, as NCCL does; gloo refuses them.

    Experts under tensor parallelism gather each rank's tokens: parts [5, h] and [3, h] travel as
    two of [5, h]. Every rank knows all lengths, because it allocates all parts. Asynchronous calls
    are passed on as they are.
    """

    @functools.wraps(all_gather)
    def gather(tensor_list: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op") or len({part.shape for part in tensor_list}) <= 1:
            return all_gather(tensor_list, tensor, *args, **kwargs)
        padded = _padded([tensor, *tensor_list])
        all_gather(padded[1:], padded[0], *args, **kwargs)
        for part, received in zip(tensor_list, padded[1:], strict=True):
            part.copy_(received[: len(part)])
        return None

    return gather


def padded_reduce_scatter(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    """`reduce_scatter` that also takes parts of different lengths, see `padded_all_gather`."""

    @functools.wraps(reduce_scatter)
    def scatter(output: Tensor, input_list: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op") or len({part.shape for part in input_list}) <= 1:
            return reduce_scatter(output, input_list, *args, **kwargs)
        padded = _padded([output, *input_list])
        reduce_scatter(padded[0], padded[1:], *args, **kwargs)
        output.copy_(padded[0][: len(output)])
        return None

    return scatter


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies that are as long in the first dimension as the longest tensor, filled with zeros."""
    longest = max(map(len, tensors))
    copies = [tensor.new_zeros(longest, *tensor.shape[1:]) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy[: len(tensor)] = tensor.detach()
    return copies
