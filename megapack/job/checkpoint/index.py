"""What torch reads of a checkpoint: its pickled index, checked before, and what was wrong after."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException

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


def read_fault(error: BaseException) -> str:
    """Why torch could not read: the innermost error, without tracebacks and torch's advice."""
    while isinstance(error, CheckpointException) or error.__cause__ is not None:
        if isinstance(error, CheckpointException):
            error = error.failures[min(error.failures)][0]
        else:
            error = error.__cause__ or error
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    # torch first says how to read a file that holds more than tensors.
    _, found, reason = str(error).partition("WeightsUnpickler error: ")
    reason = (reason if found else str(error)).partition("\n")[0].partition(". ")[0]
    return f"{type(error).__name__}: {reason or 'the file is damaged'}"


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            # Python 3.11.0 to 3.11.3 pickle a member of an enum so. Nothing else is looked up.
            return lambda kind, member: kind[member]
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _INDEX_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
