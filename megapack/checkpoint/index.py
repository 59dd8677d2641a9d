"""The pickled index of a checkpoint's tensors, checked before torch reads it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from megapack.base.files import read_whole
from megapack.errors import CheckpointError, one_line

# Names that the pickled index of a checkpoint of tensors needs. BytesStorageMetadata, for entries
# that are pickles themselves, is not among them.
_INDEX_NAMES = {
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
    """Check the index of the distributed checkpoint in `folder` before torch reads it.

    The index is a pickle, which can name any function and call it. So only the names that an index
    of tensors needs are allowed.

    Raises:
        CheckpointError: the index cannot be read, or names anything else.
    """
    path = folder / ".metadata"
    try:
        _IndexUnpickler(io.BytesIO(read_whole(path))).load()
    except Exception as error:  # a damaged pickle raises anything
        reason = one_line(error)[:120]
        raise CheckpointError(
            f"{path} is not an index of tensors ({reason}); set train.resume to another checkpoint"
        ) from None


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _INDEX_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
