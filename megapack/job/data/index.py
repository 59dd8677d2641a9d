"""The samples of a data set as they are stored: an index, and all token ids.

    data.jsonl  ->  .data.jsonl.<key>.megapack-index.npy, .megapack-tokens.npy
                    (and .megapack-routes.npy if samples carry routed experts, and one such
                    file for each column of values per response token, and those of
                    `images.stored` if samples have images)

A rank needs the lengths, prompt groups and rewards of all samples to plan, but only the tokens of
the samples that it packs. Samples are tokenized once, when the files are written. The files are
NumPy arrays without pickled objects. They are memory-mapped, so the ranks of a node share their
pages. The key in their names is a digest of everything that they depend on: the files' content
(`content`), the tokenizer, the settings, and the code that reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megapack.base.array_file import ArrayFile
from megapack.base.files import read_text, write_whole
from megapack.errors import DataError
from megapack.images import ImageNumbers, Images
from megapack.job.data.content import SUFFIX, Content, remembered
from megapack.job.data.files import list_files, read_blocks
from megapack.job.data.images.stored import IMAGE_DTYPE, IMAGES, SOURCES, Sources, StoredImages
from megapack.job.data.rollouts import ROUTES, Rollout, TokenColumns
from megapack.job.data.token_blocks import (
    ARRAYS,
    BITS,
    INDEX_DTYPE,
    Index,
    ReadSettings,
    Routes,
    TokenBlock,
    Tokens,
    make_token_block,
)
from megapack.job.data.tokenizer import Ids, Mask
from megapack.job.data.workers import read_token_blocks
from megapack.prefixes import SharedPrefixes

logger = logging.getLogger(__name__)

# Columns that say what is trained; the others say where it comes from and where it is stored.
_TRAINED_COLUMNS = (
    *("prompt_tokens", "response_tokens", "loss_tokens", "pair_sign", "group", "rollout"),
    *("reward", "advantage"),
)

# Hexadecimal digits: 64 bits of the digest.
_KEY_CHARS = 16
_INDEX = ".megapack-index.npy"
_SAMPLES = ".megapack-samples"
_TOKENS = ".megapack-tokens.npy"
# A right shift by it leaves the sign bit of an int32.
_SIGN_BIT = 31
# Names of arrays in files and in the digest of the samples, which checkpoints hold.
_STORED = {name: "routes" if name == ROUTES else name for name in ARRAYS}
_ARRAYS = {name: f".megapack-{stored}.npy" for name, stored in _STORED.items()}
_SUFFIXES = (_TOKENS, *_ARRAYS.values(), IMAGES, SOURCES, _SAMPLES, _INDEX)


@dataclass(frozen=True, eq=False)
class SampleTokens:
    """The token ids of one sample."""

    prompt_ids: Ids
    response_ids: Ids
    loss_mask: Mask | None = None
    """Per token of the response: whether it counts in the loss; None = all do."""
    routed_experts: Routes | None = None
    """The experts that each token was routed to, [tokens, MoE layers, k]; None = not given. Mapped:
    read only where it is used."""

    @property
    def counts(self) -> Mask:
        """Per token of the sample: whether it counts in the loss; the first one never does."""
        counts = np.zeros(len(self.prompt_ids) + len(self.response_ids), dtype=np.bool_)
        counts[len(self.prompt_ids) :] = True if self.loss_mask is None else self.loss_mask
        counts[:1] = False
        return counts


@dataclass(frozen=True, eq=False)
class StoredSamples:
    """Samples by number; the arrays are memory-mapped, or in memory."""

    index: Index
    all_tokens: Tokens
    samples_digest: str
    """Of all that is trained: equal samples have equal digests, from any file."""
    arrays: TokenColumns
    """Columns [response tokens of all samples, ...], and routes [routed tokens of all samples, MoE
    layers, k], of those that the samples have."""
    stored_images: StoredImages | None = None
    """None: no sample has one."""

    def images(self, numbers: npt.NDArray[np.int64]) -> list[Images]:
        """The images of each sample; their `pixels` read and process them, on any thread.

        Those raise DataError with file and line if an image cannot be decoded or has changed.
        """
        stored = self.stored_images
        return [stored.of(sample) if stored else () for sample in self.index[numbers]]

    def prefixes(
        self,
        numbers: npt.NDArray[np.int64],
        *,
        mtp_num_layers: int = 0,
        replays_routes: bool = False,
    ) -> SharedPrefixes:
        """What samples have in common at their beginnings, by the order of `numbers`.

        Only tokens that samples have in common are read, and the routes of these. Tokens of images
        are equal if the images are.

        Args:
            mtp_num_layers: layers of multi-token prediction of the model.
            replays_routes: samples share only tokens that have the same routes.
        """
        index = self.index[numbers]
        starts = index["start"].tolist()
        lengths = index["prompt_tokens"] + index["response_tokens"]
        stops = (index["start"] + lengths).tolist()
        images = self.images(numbers)
        image_numbers = ImageNumbers()

        def read(sample: int, first: int, last: int) -> npt.NDArray[Any]:
            start = starts[sample]
            stored = self.all_tokens[start + first : min(start + last, stops[sample])]
            # ~id is -1 - id, and the sign bit shifts to -1 where it is set.
            return image_numbers.compared(stored ^ (stored >> _SIGN_BIT), images[sample], first)

        routing: list[Routes | None] | None = None
        if replays_routes:
            pairs = zip(index["route_start"].tolist(), lengths.tolist(), strict=True)
            routing = [self._routes(row, length) for row, length in pairs]
        return SharedPrefixes.from_reader(
            len(numbers), read, routing=routing, mtp_num_layers=mtp_num_layers
        )

    def _routes(self, row: int, length: int) -> Routes | None:
        return None if row < 0 else self.arrays[ROUTES][row : row + length]

    def tokens(self, number: int) -> SampleTokens:
        """The tokens of one sample."""
        entry = self.index[number]
        start = int(entry["start"])
        first = start + int(entry["prompt_tokens"])
        stop = first + int(entry["response_tokens"])
        response = self.all_tokens[first:stop].astype(np.int64)
        counts = response >= 0
        return SampleTokens(
            prompt_ids=self.all_tokens[start:first].astype(np.int64),
            response_ids=np.where(counts, response, -1 - response),
            loss_mask=None if counts.all() else counts,
            routed_experts=self._routes(int(entry["route_start"]), stop - start),
        )

    @property
    def token_columns(self) -> set[str]:
        """Names of `rollouts.TOKEN_COLUMNS` that the samples have."""
        return self.arrays.keys() - {ROUTES}

    def token_column(self, name: str, number: int) -> npt.NDArray[Any]:
        """A column's values of one sample, [response tokens, ...]; mapped."""
        entry = self.index[number]
        first = int(entry["response_start"])
        return self.arrays[name][first : first + int(entry["response_tokens"])]


def load_samples(
    path: str | Path, settings: ReadSettings, spare_folder: Path, num_workers: int | None = 1
) -> StoredSamples:
    """Load the stored samples of `data.path`; read and store them first if they are not.

    Args:
        path: a file, or a folder of files, which count as one file in the order of their names.
        spare_folder: stores the samples if the data's own folder cannot be written.
        num_workers: processes that tokenize; None = one per core. It does not change the result.

    Raises:
        DataError: a file cannot be read or has a bad sample. The message has file, line and reason.
    """
    files = list_files(path)
    if settings.images is not None:
        reader = dataclasses.replace(settings.images, data_folder=_data_folder(path))
        settings = dataclasses.replace(settings, images=reader)
    folders = (_data_folder(path), spare_folder)
    content = Content(Path(path), files, folders)
    key = index_key(content.digest, settings)
    stems = [folder / (content.name + key) for folder in folders]
    for stem in stems:
        with contextlib.suppress(OSError, ValueError, EOFError, IndexError):
            stored = _read(stem, files, settings)
            content.remember(stem.parent)
            return stored
    for stem in stems:
        if _writable(stem.parent):
            _write(stem, files, settings, num_workers, content.check)
            content.remember(stem.parent)
            _remove_outdated(stem, content.digest)
            return _read(stem, files, settings)
    raise DataError(
        f"the index of {path} can be written neither to {stems[0].parent} nor to "
        f"{stems[1].parent}; set runs_dir to a folder that can be written"
    )


def index_key(content: str, settings: ReadSettings) -> str:
    """A digest of everything that an index depends on.

    Args:
        content: the digest of the files.
    """
    rest = [
        getattr(settings, each.name)
        for each in dataclasses.fields(settings)
        if each.name not in ("tokenizer", "images")
    ]
    digests = [settings.tokenizer.digest, settings.images and settings.images.digest]
    whole = repr((_sources(), content, digests, rest))
    return hashlib.sha256(whole.encode()).hexdigest()[:_KEY_CHARS]


@functools.cache
def _sources() -> str:
    """A digest of the code that reads samples: what another version stored is read again."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _samples_digest(
    index: Index, tokens: Tokens, arrays: TokenColumns, images: StoredImages | None = None
) -> str:
    """`StoredSamples.samples_digest`."""
    trained: dict[str, npt.NDArray[Any]] = {name: index[name] for name in _TRAINED_COLUMNS}
    trained["tokens"] = tokens
    for name, array in arrays.items():
        trained[_STORED[name]] = array.astype(ARRAYS[name], copy=False)
    if images:
        trained |= {"images": index["images"], **images.trained}
    parts = sorted(
        (name, hashlib.sha256(np.ascontiguousarray(array).data).hexdigest())
        for name, array in trained.items()
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class _Builder:
    """Makes the index of token blocks; numbers prompt groups and rollouts as they first appear."""

    def __init__(self) -> None:
        self._groups: dict[int | str, int] = {}
        # By the number of the prompt group, and the name within it.
        self._rollouts: dict[tuple[int, int | str], int] = {}
        self._rows: list[Index] = [np.zeros(0, INDEX_DTYPE)]
        self._given: list[npt.NDArray[np.int8]] = [np.zeros(0, np.int8)]
        # Bits of the columns that all samples have; None before the first sample.
        self._columns: int | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of a token's values, by array."""

    def add(self, token_block: TokenBlock) -> None:
        """Add the next token block.

        Raises:
            DataError: its routes or columns are others than those before; without the file's name.
        """
        rows = token_block.rows
        groups = self._groups
        rollouts = self._rollouts
        group = [groups.setdefault(each, len(groups)) for each in token_block.groups]
        keys = zip(group, token_block.rollouts, strict=True)
        rows["group"] = group
        rows["rollout"] = [rollouts.setdefault(each, len(rollouts)) for each in keys]
        self._check_arrays(token_block)
        self._rows.append(rows)
        self._given.append(token_block.given)

    def index(self) -> Index:
        """The index of all blocks."""
        index = np.concatenate(self._rows)
        lengths = index["prompt_tokens"].astype(np.int64) + index["response_tokens"]
        is_routed = (np.concatenate(self._given) & BITS[ROUTES]) > 0
        index["start"] = _starts(lengths)
        index["route_start"] = np.where(is_routed, _starts(lengths * is_routed), -1)
        index["response_start"] = _starts(index["response_tokens"])
        index["image_start"] = _starts(index["images"])
        return index

    def _check_arrays(self, token_block: TokenBlock) -> None:
        numbers = token_block.rows["number"]
        # Routes may be given for some samples only.
        given = token_block.given & ~BITS[ROUTES]
        if self._columns is None and len(given):
            self._columns = int(given[0])
        for other in np.flatnonzero(given != self._columns)[:1]:
            name = next(name for name, bit in BITS.items() if bit & (given[other] ^ self._columns))
            raise DataError(
                f"{numbers[other]}: {name} is given for some samples only; give it for all, or for "
                "none"
            )
        for name, arrays in token_block.arrays.items():
            with_it = numbers[(token_block.given & BITS[name]) > 0]
            for number, values in zip(with_it.tolist(), arrays, strict=True):
                shape = self.shapes.setdefault(name, values.shape[1:])
                if values.shape[1:] != shape:
                    raise DataError(
                        f"{number}: {name} has {_sizes(values.shape[1:])}, samples before it "
                        f"{_sizes(shape)}; give equally many"
                    )


def _starts(sizes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Where each of consecutive parts begins."""
    starts: npt.NDArray[np.int64] = np.cumsum(sizes, dtype=np.int64) - sizes
    return starts


def _sizes(shape: tuple[int, ...]) -> str:
    """Those of a token's values: "k=8", or "layers=48, k=8"."""
    names = ("layers", "k")[-len(shape) :]
    return ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))


def store_in_memory(records: Sequence[Rollout]) -> StoredSamples:
    """Samples that are in memory, as if read from one file."""
    builder = _Builder()
    token_block = make_token_block(enumerate(records, start=1))
    builder.add(token_block)
    index = builder.index()
    arrays = {name: np.concatenate(values) for name, values in token_block.arrays.items()}
    digest = _samples_digest(index, token_block.tokens, arrays)
    return StoredSamples(index, token_block.tokens, digest, arrays)


def _write(
    stem: Path,
    files: Sequence[Path],
    settings: ReadSettings,
    num_workers: int | None,
    check: Callable[[], None],
) -> None:
    """Write the arrays piece by piece under other names, and rename them when they are complete.

    The index is written last: where there is an index, there is the rest.

    Args:
        check: raises if what was read has changed.
    """
    blocks = ((n, block) for n, path in enumerate(files) for block in read_blocks(path))
    total = sum(path.stat().st_size for path in files)
    builder = _Builder()
    sources = Sources()
    num_skipped = 0
    num_truncated = 0
    with contextlib.ExitStack() as stack:
        tokens = stack.enter_context(ArrayFile(_named(stem, _TOKENS), np.dtype("<i4")))
        others: dict[str, ArrayFile] = {}

        def write(suffix: str, dtype: npt.DTypeLike, items: Any, shape: tuple[int, ...]) -> None:
            if suffix not in others:
                file_of = ArrayFile(_named(stem, suffix), np.dtype(dtype), shape)
                others[suffix] = stack.enter_context(file_of)
            others[suffix].write(items)

        for file, token_block in read_token_blocks(blocks, settings, num_workers, total):
            try:
                builder.add(token_block)
            except DataError as error:
                raise DataError(f"{files[file]}:{error}") from None
            if token_block.error:
                raise DataError(f"{files[file]}:{token_block.error}")
            tokens.write(token_block.tokens)
            for name, arrays in token_block.arrays.items():
                for array in arrays:
                    write(_ARRAYS[name], ARRAYS[name], array, builder.shapes[name])
            if token_block.images:
                rows, added = sources.add(token_block.images)
                write(IMAGES, IMAGE_DTYPE, rows, ())
                write(SOURCES, np.uint8, np.frombuffer(b"".join(added), np.uint8), ())
            num_skipped += token_block.num_skipped
            num_truncated += token_block.num_truncated
        index = builder.index()
        path = files[0] if len(files) == 1 else files[0].parent
        most = settings.max_length
        if num_skipped:
            logger.warning("%s: %d samples above %s tokens skipped", path, num_skipped, most)
        if num_truncated:
            logger.warning("%s: %d samples truncated to %s tokens", path, num_truncated, most)
        if len(index) == 0:
            raise DataError(
                f"{path} has no sample ({num_skipped} were above max_length={most}); give at least "
                "one"
            )
        check()
        for array_file in (tokens, *others.values()):
            array_file.finish()
        mapped = _map_arrays(stem), _map_images(stem, files, settings)
        write_whole(_named(stem, _SAMPLES), _samples_digest(index, _map(stem, _TOKENS), *mapped))
        index_file = stack.enter_context(ArrayFile(_named(stem, _INDEX), INDEX_DTYPE))
        index_file.write(index)
        index_file.finish()


def _remove_outdated(stem: Path, content: str) -> None:
    """Remove what is stored of the same data under other keys, and digests of other content."""
    same_data = re.compile(re.escape(stem.name[:-_KEY_CHARS]) + f"[0-9a-f]{{{_KEY_CHARS}}}")
    for other in stem.parent.iterdir():
        for suffix in (*_SUFFIXES, SUFFIX):
            name = other.name.removesuffix(suffix)
            is_kept = name == stem.name or (suffix == SUFFIX and remembered(other) == content)
            if name != other.name and same_data.fullmatch(name) and not is_kept:
                other.unlink(missing_ok=True)


def _read(stem: Path, files: Sequence[Path], settings: ReadSettings) -> StoredSamples:
    """Map the arrays of a data set.

    Raises:
        OSError, ValueError, EOFError, IndexError: they are missing, damaged, or of another format.
    """
    index = _map(stem, _INDEX)
    if index.dtype != INDEX_DTYPE:
        raise ValueError(f"{stem} has other columns")
    tokens = _map(stem, _TOKENS)
    arrays = _map_arrays(stem)
    images = _map_images(stem, files, settings)
    last = index[-1]
    sizes = dict.fromkeys(arrays, last["response_start"] + last["response_tokens"])
    routed = index[index["route_start"] >= 0]
    if len(routed):
        sizes[ROUTES] = routed["prompt_tokens"].sum() + routed["response_tokens"].sum()
    is_whole = len(tokens) == last["start"] + last["prompt_tokens"] + last["response_tokens"]
    if not is_whole or any(len(arrays.get(name, ())) != size for name, size in sizes.items()):
        raise ValueError(f"{stem} has other tokens or columns than its index")
    num_images = index["images"].sum()
    if num_images != (len(images.rows) if images else 0) or (images and not images.is_current):
        raise ValueError(f"{stem} has other images than its index, or they have changed")
    return StoredSamples(index, tokens, read_text(_named(stem, _SAMPLES)), arrays, images)


def _map_arrays(stem: Path) -> TokenColumns:
    return {
        name: _map(stem, suffix)
        for name, suffix in _ARRAYS.items()
        if _named(stem, suffix).exists()
    }


def _map_images(stem: Path, files: Sequence[Path], settings: ReadSettings) -> StoredImages | None:
    if settings.images is None or not _named(stem, IMAGES).exists():
        return None
    return StoredImages(_map(stem, IMAGES), _map(stem, SOURCES), settings.images, files)


def _map(stem: Path, suffix: str) -> npt.NDArray[Any]:
    return np.load(_named(stem, suffix), mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


def _named(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


def _data_folder(path: str | Path) -> Path:
    path = Path(path)
    return path if path.is_dir() else path.parent


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(prefix=".megapack-probe-", dir=folder):
            pass
    except OSError:
        return False
    return True
