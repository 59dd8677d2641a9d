"""A Hugging Face folder of safetensors; all of its files are checked before a tensor is read."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megapack.base.files import misplaced, read_text, strict_json
from megapack.errors import ConfigError, brief, first_line

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("F32", "BF16", "F16", "F64")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a folder."""

    file: str
    """Name of its file."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it, such as BF16."""


class HfFolder:
    """The tensors of a folder.

    Args:
        path: a folder with `model.safetensors`, or with several files and an index.
        single: the name of the file, if there is one.

    Raises:
        ConfigError: files are missing, truncated, quantized, of another format, or not those of
            the index.
    """

    def __init__(self, path: str | Path, *, single: str = SINGLE) -> None:
        self.path = Path(path)
        self.tensors: dict[str, StoredTensor] = {}
        weight_map = _weight_map(self.path, single)
        for file in [single] if weight_map is None else _files(self.path, weight_map):
            with self.open(file) as tensors:
                names = tensors.keys()
                for name in names:
                    self._add(name, file, tensors.get_slice(name))
        if weight_map is not None:
            self._check_index(weight_map)

    def __str__(self) -> str:
        return str(self.path)

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[Any]:
        """Safetensors' reader of a file, for the block.

        Raises:
            ConfigError: the file cannot be read as safetensors, now or within the block.
        """
        safe_open = _safe_open()
        try:
            with safe_open(self.path / file, framework="pt") as tensors:
                yield tensors
        except ConfigError:
            raise
        except Exception as error:  # safetensors' own errors and OSError
            raise ConfigError(
                f"{self.path / file} cannot be read ({first_line(error)}"
                f"{misplaced(self.path / file)}); copy or download it again"
            ) from error

    def read(self, name: str) -> Any:
        """A tensor's values.

        Raises:
            ConfigError: see `open`.
        """
        with self.open(self.tensors[name].file) as tensors:
            return tensors.get_tensor(name)

    def _add(self, name: str, file: str, view: Any) -> None:
        before = self.tensors.get(name)
        if before is not None:
            raise ConfigError(f"{self}: {name} is in {before.file} and in {file}; keep one of them")
        dtype = view.get_dtype()
        if dtype not in _FLOATS or name.endswith(("_scale_inv", ".qweight", ".weight_packed")):
            raise ConfigError(
                f"{self}: {name} ({dtype}) belongs to quantized weights; make a folder of bf16 "
                "weights from it (DeepSeek publishes fp8_cast_bf16.py) and set that"
            )
        self.tensors[name] = StoredTensor(file, tuple(view.get_shape()), dtype)

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        """Compare the index with what the files hold."""
        for name, file in weight_map.items():
            found = self.tensors.get(name)
            if found is None or found.file != file:
                place = "no file" if found is None else found.file
                raise ConfigError(
                    f"{self.path / INDEX} says that {name} is in {file}, it is in {place}; copy or "
                    "download the folder again"
                )
        extra = sorted(self.tensors.keys() - weight_map.keys())
        if extra:
            raise ConfigError(
                f"{self.path / INDEX} does not list {extra[0]}, which is in "
                f"{self.tensors[extra[0]].file}; copy or download the folder again"
            )


def _weight_map(path: Path, single: str) -> dict[str, str] | None:
    """The index's file of each tensor; None if the folder has a single file."""
    # A pipe or a device, which would be read for ever, is no file.
    if (path / single).is_file():
        return None
    file = path / INDEX
    if not file.is_file():
        raise ConfigError(_what_is_missing(path, single))
    try:
        weight_map = strict_json(read_text(file))["weight_map"]
        plain = {str(name): str(Path(value).name) for name, value in weight_map.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not an index of safetensors ({first_line(error)}); copy or download it "
            "again"
        ) from None
    if plain != weight_map or not plain:
        raise ConfigError(
            f"{file}: weight_map is {brief(weight_map)}; it must name files by tensor"
        )
    return plain


def _what_is_missing(path: Path, single: str) -> str:
    if not path.is_dir():
        return f"{path} is not a folder; set the folder of a Hugging Face model"
    others = sorted(file.name for file in path.glob("*.bin"))
    if others:
        return (
            f"{path} has weights as {others[0]}, not as safetensors; write them with transformers' "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER) and set that"
        )
    return f"{path} has neither {single} nor {INDEX}; download the weights too"


def _files(path: Path, weight_map: Mapping[str, str]) -> Sequence[str]:
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise ConfigError(
            f"{path} lacks {missing[0]}, one of the {len(files)} files of its index "
            f"({len(missing)} missing); download them again"
        )
    return files


def _safe_open() -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ConfigError(
            "weights in safetensors need the package safetensors; pip install safetensors"
        ) from None
    return safe_open
