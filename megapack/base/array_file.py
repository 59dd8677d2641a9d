"""Writes a NumPy array piece by piece, whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class ArrayFile:
    """Writes a NumPy array piece by piece under another name.

    Without `finish` nothing is left.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], item_shape: tuple[int, ...] = ()) -> None:
        self._path = path
        # A process id would not be unique: two nodes may share the folder. tempfile would not do
        # either: only the owner may read its files.
        self._part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        self._dtype = dtype
        self._item_shape = item_shape
        self._num_items = 0
        self._file = open(self._part, "xb")  # noqa: SIM115
        # The number of items is not known yet; 10**12 stands in for it.
        self._write_header(10**12)
        self._start = self._file.tell()

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def write(self, array: npt.NDArray[Any]) -> None:
        """Add items."""
        self._file.write(np.ascontiguousarray(array, dtype=self._dtype).tobytes())
        self._num_items += len(array)

    def finish(self) -> None:
        """Sync the file and give it its name."""
        # NumPy pads the header to a fixed length, so the true count fits into the same bytes.
        self._file.seek(0)
        self._write_header(self._num_items)
        assert self._file.tell() == self._start, "the header's length depends on the count"
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._part, self._path)

    def _write_header(self, num_items: int) -> None:
        shape = (num_items, *self._item_shape)
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)
