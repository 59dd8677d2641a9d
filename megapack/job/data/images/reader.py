"""Images of data files: grids from their headers, and pixels by the model's own image processor.

    path, data URI or bytes -> ImageReader.find -> SampleImage (grid, key)
    bytes -> ImageReader.pixels -> what the tower reads

Nothing is decoded before pixels are asked for: the processor's rule gives the grid of a width and a
height. transformers reads the processor of the model's folder, on first use.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapack.errors import ConfigError, first_line, reason_of
from megapack.job.data.hf_tokenizer import package_versions
from megapack.job.data.messages import BadLine, shown

if TYPE_CHECKING:
    from torch import Tensor

_CONFIGS = ("preprocessor_config.json", "processor_config.json")
_ORIENTATION = 0x0112
# Values of EXIF's orientation of which rows are columns.
_TURNED = range(5, 9)
# How pillow's modes of integers above 255 and of floats begin.
_CLIPPED = "IF"


@dataclass(frozen=True)
class SampleImage:
    """An image of a sample."""

    key: bytes
    """32 bytes: SHA-256 of its bytes; of a path, half of that of path and size of the file (which
    a copy of the data set has too) and half of that of the time of its change."""
    rows: int
    """Of patches."""
    columns: int
    """Of patches."""
    tokens: int
    """That stand for it in the sample."""
    source: bytes | str
    """Its bytes, or its path as the data file has it."""
    offset: int = 0
    """Index of its first token in the sample."""


@dataclass(frozen=True)
class ImageReader:
    """Reads images as one model does. It can be pickled.

    Args:
        folder: the model's folder, with its image processor.
        image_token: id of the token that stands for an image's patches.
        video_token: id of that of videos, which are refused.
        merge: patches of a token in each direction.
        data_folder: paths of images are relative to it.
    """

    folder: Path
    image_token: int
    video_token: int | None = None
    merge: int = 2
    data_folder: Path = Path()

    def __reduce__(self) -> tuple[type[ImageReader], tuple[Any, ...]]:
        # Without the processor: another process loads it again.
        ids = (self.image_token, self.video_token)
        return ImageReader, (self.folder, *ids, self.merge, self.data_folder)

    @property
    def digest(self) -> str:
        """Names everything that decides grids and places of images."""
        rest = (package_versions(), self.image_token, self.video_token, self.merge)
        digest = hashlib.sha256(repr(rest).encode())
        for path in (self.folder / name for name in _CONFIGS):
            content = path.read_bytes() if path.is_file() else b""
            digest.update(f"{path.name} {len(content)} ".encode() + content)
        return digest.hexdigest()

    @property
    def backend(self) -> str:
        """The class that makes pixels: transformers has two of each, which may resize otherwise."""
        return type(self._processor).__name__

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of an image of so many pixels.

        Raises:
            ValueError: the processor refuses such an image.
        """
        processor = self._processor
        size = processor.patch_size
        resized = sys.modules[type(processor).__module__].smart_resize(
            height,
            width,
            size * self.merge,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
        rows, columns = (pixels // size for pixels in resized)
        if rows * columns != processor.get_number_of_image_patches(height, width):
            raise ConfigError(
                f"{self.folder}: {self.backend} of this transformers has another rule of sizes "
                "than megapack knows; install transformers 5.23"
            )
        return rows, columns

    def find(self, name: str, source: Any) -> SampleImage:
        """An image of a line, by its header.

        Args:
            name: of the image, with which errors begin.
            source: a path, a data URI, bytes, or an object with `bytes` or `path`.

        Raises:
            BadLine: it cannot be read or is no image.
        """
        if isinstance(source, dict):
            source = source.get("bytes") or source.get("path")
        if isinstance(source, str) and source.startswith("data:"):
            source = _decoded(name, source)
        if isinstance(source, bytes):
            key = hashlib.sha256(source).digest()
        elif isinstance(source, str) and source:
            if source.startswith(("http://", "https://")):
                raise BadLine(f"{name} is {shown(source)}, not fetched; give a path or a data URI")
            source = source.removeprefix("file://")
            key = self.key_of_path(name, source)
        else:
            raise BadLine(f"{name} is {shown(source)}, expected a path, a data URI or bytes")
        where = name if isinstance(source, bytes) else f"{name} ({source})"
        rows, columns = self._grid_of(where, source)
        return SampleImage(key, rows, columns, rows * columns // self.merge**2, source)

    def key_of_path(self, name: str, source: str) -> bytes:
        """The key of an image as its file is now; without one BadLine, which begins with `name`."""
        try:
            found = (self.data_folder / source).stat()
        # A path with a NUL is a ValueError.
        except (OSError, ValueError) as error:
            raise _unreadable(name, source, error) from None
        parts = (repr((source, found.st_size)), repr(found.st_mtime_ns))
        return b"".join(hashlib.sha256(part.encode()).digest()[:16] for part in parts)

    def pixels(self, data: bytes, rows: int, columns: int) -> Tensor:
        """What the tower reads of an image, fp32 [patches, numbers of a patch].

        Args:
            rows, columns: of patches, as `find` has them.

        Raises:
            Exception: any, if it cannot be decoded, or has another grid.
        """
        from transformers.image_utils import load_image

        with _pillow().open(io.BytesIO(data)) as image:
            # Turned as EXIF says, and RGB.
            made = self._processor(images=[load_image(image)], return_tensors="pt")
        grid = made["image_grid_thw"].tolist()
        if grid != [[1, rows, columns]]:
            raise ValueError(f"{rows} x {columns} patches by its header, but its grid is {grid}")
        pixels: Tensor = made["pixel_values"]
        return pixels

    def _grid_of(self, where: str, source: bytes | str) -> tuple[int, int]:
        Image = _pillow()
        file = io.BytesIO(source) if isinstance(source, bytes) else self.data_folder / source
        try:
            with Image.open(file) as image:
                # The method of PNG decodes the image, in search of EXIF behind it.
                turned = Image.Image.getexif(image).get(_ORIENTATION) in _TURNED
                width, height = image.size
                mode = image.mode
            if mode[0] in _CLIPPED:
                raise BadLine(
                    f"{where} has pixels of mode {mode}, which become white or black in 8 bits; "
                    "scale them to 8 bits"
                )
            return self.grid(*((height, width) if turned else (width, height)))
        except Image.UnidentifiedImageError:
            raise BadLine(f"{where} is no image that pillow reads; leave the line out") from None
        except Image.DecompressionBombError as error:
            raise BadLine(f"{where} is too large ({first_line(error)}); make it smaller") from None
        except (BadLine, ConfigError):
            raise
        except Exception as error:  # pillow raises what it likes for a damaged image
            why = getattr(error, "strerror", None) or first_line(error)
            raise BadLine(f"{where} cannot be read ({why}); leave the line out") from None

    @functools.cached_property
    def _processor(self) -> Any:
        try:
            from transformers import AutoImageProcessor
        except ImportError:
            raise ConfigError("images need transformers; pip install transformers") from None
        try:
            found = AutoImageProcessor.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # the library raises what it likes for a damaged file
            raise ConfigError(
                f"{self.folder}: the image processor cannot be read ({first_line(error)}); set "
                "model.hf_path to a folder with preprocessor_config.json"
            ) from None
        if not hasattr(sys.modules[type(found).__module__], "smart_resize"):
            raise ConfigError(
                f"{self.folder}: the image processor {type(found).__name__} is not known; give "
                "one of Qwen's models"
            )
        if found.merge_size != self.merge:
            raise ConfigError(
                f"{self.folder}: the image processor merges {found.merge_size} patches, the tower "
                f"{self.merge}; set merge_size in preprocessor_config.json"
            )
        return found


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("images need pillow; pip install pillow") from None
    return Image


def _decoded(name: str, uri: str) -> bytes:
    head, _, body = uri.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("not base64")
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise BadLine(
            f"{name} is {shown(uri)}, a data URI that cannot be read ({first_line(error)}); write "
            "data:image/png;base64,..."
        ) from None


def _unreadable(name: str, source: str, error: Exception) -> BadLine:
    return BadLine(
        f"{name} is {shown(source)}, which cannot be read ({reason_of(error)}); give a path "
        "relative to the data file's folder"
    )
