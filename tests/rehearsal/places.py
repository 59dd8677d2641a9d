"""Where a GPU run would have the memory of a tensor, noted on the storage of a real CPU tensor.

The note is an attribute of the `UntypedStorage`. torch keeps that Python object as long as the
memory lives and gives it to every tensor that shares the memory: views, `detach`, `param.data`. It
ends with the memory, so a later storage at the same address begins without a note.
"""

from __future__ import annotations

import enum

from torch import Tensor


class Place(enum.Enum):
    """Where memory would be."""

    HOST = "host"
    """Pageable memory of the host."""
    PINNED = "pinned"
    """Memory of the host from which a GPU copies by itself."""
    GPU = "gpu"
    EITHER = "either"
    """Made inside torch without a tensor as input, such as the zeros of a missing gradient. On a
    GPU torch would make it where it is needed, so it becomes GPU in its first use with one."""


_NOTE = "_rehearsed_place"


def place_of(tensor: Tensor) -> Place:
    """The noted place; memory without a note is the host's."""
    place: Place = getattr(tensor.untyped_storage(), _NOTE, Place.HOST)
    return place


def put(tensor: Tensor, place: Place) -> Tensor:
    """Note the place of the tensor's whole storage; returns the tensor."""
    setattr(tensor.untyped_storage(), _NOTE, place)
    return tensor


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a GPU run would have the tensor on the GPU."""
    return place_of(tensor) is Place.GPU
