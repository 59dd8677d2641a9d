"""Safetensors files, written tensor by tensor.

A file starts with the length of its header (8 bytes), the header (JSON: type, shape and place of
each tensor), and then the tensors' bytes one after another. Types and shapes are known before the
values, so a file of 5 GB needs the memory of one tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapack.job.hf.folder import INDEX, SINGLE

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
"""By the names of safetensors."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ShardWriter:
    """A file of tensors that come in the order of `tensors`.

    Args:
        tensors: each with its name, shape, dtype and num_bytes; values may not be known yet.
    """

    def __init__(self, path: Path, tensors: Sequence[Any]) -> None:
        self.path = path
        self._waiting = [tensor.name for tensor in tensors]
        self._file = open(path, "wb")  # noqa: SIM115 - closed by `write` and `close`
        self._header = _header(tensors)

    def write(self, name: str, values: Tensor) -> None:
        """Write the next tensor; the file is closed and synced after the last one."""
        assert name == self._waiting.pop(0), f"{name} is not the next tensor of {self.path}"
        self._file.write(self._header)
        self._header = b""
        self._file.write(values.contiguous().flatten().view(torch.uint8).numpy().data)
        if not self._waiting:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def close(self) -> None:
        """Close the file, complete or not."""
        self._file.close()


def _header(tensors: Sequence[Any]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + tensor.num_bytes
        place = {"shape": list(tensor.shape), "data_offsets": [at, end]}
        entries[tensor.name] = {"dtype": _NAMES[tensor.dtype], **place}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The values start at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_names(count: int) -> list[str]:
    """Names of the files of a folder, as transformers gives them."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_index(folder: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    """Write the index of several files; none is needed for one."""
    if set(weight_map.values()) == {SINGLE}:
        return
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
