"""Checks the one pickled file of a checkpoint before torch reads it.

Megatron's distributed format keeps the index of its tensors in `.metadata`, which torch unpickles
without a limit: whoever wrote the file could have any function called. An index that names
anything but the classes of an index of tensors is refused here; entries that are none would be
unpickled later.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megapack.errors import CheckpointError

INDEX = ".metadata"

_TORCH = "torch.distributed.checkpoint"
_NAMES = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_TORCH}.filesystem", "_StorageInfo"),
    *(
        (f"{_TORCH}.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


def check_index(folder: Path) -> None:
    """Refuse an index that is more than one.

    Args:
        folder: of a distributed checkpoint, `state/`.

    Raises:
        CheckpointError: what it names, or that it cannot be read.
    """
    path = folder / INDEX
    try:
        with open(path, "rb") as file:
            index = _Unpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # broken pickles raise anything
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{path} holds no index")


class _Unpickler(pickle.Unpickler):
    """Knows the classes of an index, and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _NAMES:
            return super().find_class(module, name)
        raise CheckpointError(
            f"names {module}.{name}, which no checkpoint of tensors needs: it is not megapack's, "
            "or it was changed"
        )
