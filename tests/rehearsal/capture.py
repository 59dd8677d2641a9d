"""What `torch.cuda.graph` would capture of CPU code: each operation, its numbers and its addresses.

    with Capture() as first:
        model(static inputs)
    # the second row is copied into the static inputs
    with Capture() as second:
        model(static inputs)
    assert first.operations == second.operations

A graph replays the kernels that it has captured, on the addresses that they had then. So a second
run must be the same operations with the same shapes and numbers. A tensor that was there before the
run must be at the same address; one that the run has made is at any, as graphs have memory of their
own. Values that the host reads would be those of the captured run: they are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Their results, or the shapes of these, are values of the host; the last one is its memory.
_HOST = {
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::bincount"),
    *("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::equal"),
    *("aten::is_nonzero", "aten::allclose", "aten::repeat_interleave.Tensor", "aten::lift_fresh"),
}


class HostError(AssertionError):
    """The host reads a value, or gives one to the device, where a graph is captured."""


class Capture(TorchDispatchMode):
    """Records this thread's operations, forward and backward.

    Attributes:
        operations: the name of each, and what it got and returned: of a tensor its shape, strides,
            dtype and address, None for one that the run has made; other values as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, list[Any], list[Any]]] = []
        self._made: dict[int, Tensor] = {}
        self._is_in_kernel = False
        self._tolist = mock.patch.object(Tensor, "tolist", self._reading(Tensor.tolist))

    def __enter__(self) -> Self:
        self._tolist.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tolist.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        masks = tree_leaves(args[1:2]) if name.startswith("aten::index") else ()
        if name in _HOST or any(getattr(mask, "dtype", None) is torch.bool for mask in masks):
            raise HostError(f"{name} where a graph is captured")
        given = tree_leaves((args, kwargs or {}))
        before = [self._described(value) for value in given]
        self._is_in_kernel = True
        try:
            results = func(*args, **(kwargs or {}))
        finally:
            self._is_in_kernel = False
        held = {_address(value) for value in given if isinstance(value, Tensor)}
        for value in tree_leaves(results):
            if isinstance(value, Tensor) and _address(value) not in held:
                # Kept, so that no other tensor gets its address.
                self._made.setdefault(_address(value), value)
        after = [self._described(value) for value in tree_leaves(results)]
        self.operations.append((name, before, after))
        return results

    def _described(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_made = _address(value) in self._made
        address = None if is_made else value.data_ptr()
        return tuple(value.shape), value.stride(), value.dtype, address

    def _reading(self, tolist: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def read(tensor: Tensor) -> Any:
            # A kernel's own code, which stands for one on the device.
            if not self._is_in_kernel:
                raise HostError("Tensor.tolist where a graph is captured")
            return tolist(tensor)

        return read


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
