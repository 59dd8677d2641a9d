"""The index of Megatron's distributed checkpoint format, looked through before torch reads it.

torch keeps it as a pickle, which may name any function and call it. A checkpoint of someone else
must not: only names that an index of tensors needs are let through.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from megapack.errors import CheckpointError
from megapack.files import read_whole

# Not among them: the metadata of entries that are pickles themselves.
_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata"),
    },
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


def check_index(folder: Path) -> None:
    """Look through the index of the distributed checkpoint in `folder`.

    Raises:
        CheckpointError: it cannot be read, or names what an index of tensors does not need.
    """
    path = folder / ".metadata"
    try:
        _IndexUnpickler(io.BytesIO(read_whole(path))).load()
    except Exception as error:  # a damaged pickle raises anything
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"{path} is no index of tensors ({reason}); set train.resume to another checkpoint"
        ) from None


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
