"""Images of a data set as they are stored: a row per image of a sample, and each source once.

    .data.jsonl.<key>.megapack-images.npy, .megapack-sources.npy

A source is the bytes of an image, or a path as text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megapack.errors import ConfigError, DataError, first_line
from megapack.images import ImageRef, Images
from megapack.job.data.images.reader import ImageReader, SampleImage
from megapack.job.data.messages import BadLine

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_DTYPE = np.dtype(
    [
        ("key", "u1", (32,)),
        ("offset", "<i4"),  # index of its first token in the sample
        ("rows", "<i4"),  # of patches
        ("columns", "<i4"),  # of patches
        ("is_path", "?"),
        ("source_start", "<i8"),  # position of its source among the bytes of all
        ("source_bytes", "<i8"),
    ]
)
IMAGES = ".megapack-images.npy"
SOURCES = ".megapack-sources.npy"
"""Ends of the files' names."""
# Of a key, those that a copy of the data set has too.
_LASTING = 16
# At most about so many files are looked at when a data set is opened.
_FILES_CHECKED = 256


class Sources:
    """Rows of images, and the bytes that they add to those of all sources."""

    def __init__(self) -> None:
        self._starts: dict[bytes, int] = {}
        self._end = 0

    def add(self, images: Iterable[SampleImage]) -> tuple[npt.NDArray[Any], list[bytes]]:
        """The rows of images, and the sources that no image before them had."""
        rows, sources = [], []
        for image in images:
            is_path = isinstance(image.source, str)
            source = image.source.encode() if isinstance(image.source, str) else image.source
            if image.key not in self._starts:
                self._starts[image.key] = self._end
                self._end += len(source)
                sources.append(source)
            place = (image.offset, image.rows, image.columns)
            start = self._starts[image.key]
            rows.append((tuple(image.key), *place, is_path, start, len(source)))
        return np.array(rows, IMAGE_DTYPE), sources


@dataclass(frozen=True, eq=False)
class StoredImages:
    """The images of all samples; the arrays are memory-mapped."""

    rows: npt.NDArray[Any]
    sources: npt.NDArray[np.uint8]
    reader: ImageReader
    files: Sequence[Path]
    """Of the data set, for errors."""

    @property
    def trained(self) -> dict[str, npt.NDArray[Any]]:
        """What says what is trained, by name."""
        fields = {f"image_{name}": self.rows[name] for name in ("offset", "rows", "columns")}
        return {"image_key": self.rows["key"][:, :_LASTING], **fields}

    @property
    def is_current(self) -> bool:
        """Whether all sources are there, and no file has changed of some that are looked at."""
        ends = self.rows["source_start"] + self.rows["source_bytes"]
        if len(self.sources) != int(ends.max(initial=0)):
            return False
        files = np.flatnonzero(self.rows["is_path"])
        looked_at = self.rows[files[:: 1 + len(files) // _FILES_CHECKED]]
        try:
            return all(map(self._is_unchanged, looked_at))
        except BadLine:
            return False

    def _is_unchanged(self, row: npt.NDArray[np.void], name: str = "") -> bool:
        """Whether the file of a path is the one that was indexed; BadLine if there is none."""
        path = self._source(row).decode()
        return self.reader.key_of_path(name, path) == row["key"].tobytes()

    def _source(self, row: npt.NDArray[np.void]) -> bytes:
        start = int(row["source_start"])
        return self.sources[start : start + int(row["source_bytes"])].tobytes()

    def of(self, sample: npt.NDArray[np.void]) -> Images:
        """The images of a sample, by its row of the index."""
        start = int(sample["image_start"])
        where = f"{self.files[int(sample['file'])]}:{int(sample['number'])}"
        return tuple(
            ImageRef(
                offset=int(row["offset"]),
                grid=(1, int(row["rows"]), int(row["columns"])),
                key=row["key"].tobytes().hex(),
                pixels=functools.partial(self._pixels, f"{where}: image {number}", row),
                merge=self.reader.merge,
            )
            for number, row in enumerate(self.rows[start : start + int(sample["images"])])
        )

    def _pixels(self, name: str, row: npt.NDArray[np.void]) -> Tensor:
        """What the tower reads; `name` is that of the image in errors."""
        data = self._source(row)
        try:
            if row["is_path"]:
                name = f"{name} ({data.decode()})"
                if not self._is_unchanged(row, name):
                    raise DataError(
                        f"{name} has changed since the data were read; remove .*{IMAGES} beside "
                        "the data and start again"
                    )
                data = (self.reader.data_folder / data.decode()).read_bytes()
            return self.reader.pixels(data, int(row["rows"]), int(row["columns"]))
        except (ConfigError, DataError):
            raise
        except BadLine as error:
            raise DataError(str(error)) from None
        except Exception as error:  # pillow raises what it likes for a damaged image
            raise DataError(
                f"{name} cannot be decoded ({first_line(error)}); leave its line out"
            ) from None
