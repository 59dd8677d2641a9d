"""A data set: what planning needs of all samples, and tokens of those that are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megapack.data.files import BadLine, SampleFile, list_files, open_file
from megapack.data.index import INDEX_DTYPE, Index, ReadSettings, load_index
from megapack.data.rollouts import Rollout, SampleReward, group_batches
from megapack.data.tokenizer import Ids
from megapack.errors import DataError
from megapack.plan.plan import Plan, own_samples

Rows = npt.NDArray[np.int64]


class TokenTaker(Protocol):
    """A `samples.SampleBatch`."""

    def set_tokens(self, sample: int, prompt: Ids, response: Ids) -> None:
        """Take the tokens of one sample."""
        ...


class TokenSource(Protocol):
    """Gives the tokens of single samples."""

    def tokens(self, row: int) -> tuple[Ids, Ids]:
        """Prompt and response of one sample."""
        ...


class Dataset:
    """Samples by number, in the order of their files.

    Args:
        index: one row per sample, see `data_index`.
        source: where tokens come from.
    """

    def __init__(self, index: Index, source: TokenSource) -> None:
        self._index, self._source = index, source

    def __len__(self) -> int:
        return len(self._index)

    @classmethod
    def from_files(cls, path: str | Path, settings: ReadSettings, spare_folder: Path) -> Dataset:
        """The samples of `data.path`; see `data_index.load_index`."""
        index = load_index(path, settings, spare_folder)
        return cls(index, _Files(list_files(path), index, settings))

    @classmethod
    def from_rollouts(cls, records: Sequence[Rollout]) -> Dataset:
        """Samples that are in memory."""
        groups: dict[object, int] = {}
        rollouts: dict[object, int] = {}
        nan = float("nan")
        rows = [
            (
                *(0, number, number + 1, len(record.prompt_ids), len(record.response_ids)),
                groups.setdefault(record.group, len(groups)),
                rollouts.setdefault(record.key, len(rollouts)),
                nan if record.reward is None else record.reward,
                nan if record.advantage is None else record.advantage,
            )
            for number, record in enumerate(records)
        ]
        return cls(np.array(rows, dtype=INDEX_DTYPE), _Memory(records))

    def digest(self) -> str:
        """Of all samples' lengths, groups and rollouts: what batches and plans depend on."""
        digest = hashlib.sha256()
        for name in ("prompt_tokens", "response_tokens", "group", "rollout"):
            digest.update(self._index[name].tobytes())
        return digest.hexdigest()

    def batches(
        self, prompts_per_batch: int, *, shuffle: bool = False, seed: int = 0, epoch: int = 0
    ) -> Iterator[Rows]:
        """Sample numbers in batches of whole groups, see `rollouts.group_batches`."""
        return group_batches(
            self._index["group"], prompts_per_batch, shuffle=shuffle, seed=seed, epoch=epoch
        )

    def prompt_tokens(self, rows: Rows) -> list[int]:
        """Tokens of these samples' prompts."""
        return self._index["prompt_tokens"][rows].tolist()  # type: ignore[no-any-return]

    def response_tokens(self, rows: Rows) -> list[int]:
        """Tokens of these samples' responses."""
        return self._index["response_tokens"][rows].tolist()  # type: ignore[no-any-return]

    def rollout_ids(self, rows: Rows) -> list[int]:
        """A number per sample, by first appearance among these: equal where rollouts are."""
        numbers: dict[int, int] = {}
        ids = self._index["rollout"][rows].tolist()
        return [numbers.setdefault(rollout, len(numbers)) for rollout in ids]

    def num_rollouts(self, rows: Rows) -> int:
        """Rollouts among these samples."""
        return len(np.unique(self._index["rollout"][rows]))

    def rewards(self, rows: Rows) -> list[SampleReward]:
        """Groups, rollouts, rewards and advantages of these samples."""
        names = ("group", "rollout", "reward", "advantage")
        columns = [self._index[name][rows].tolist() for name in names]
        return [
            SampleReward(group, rollout, _given(reward), _given(advantage))
            for group, rollout, reward, advantage in zip(*columns, strict=True)
        ]

    def tokens(self, row: int) -> tuple[Ids, Ids]:
        """Prompt and response of one sample, read now.

        Raises:
            DataError: the file has changed since it was indexed.
        """
        return self._source.tokens(row)

    def give_tokens(
        self, batch: TokenTaker, rows: Rows, plans: Sequence[Plan], dp_rank: int
    ) -> None:
        """Give a batch of these samples the tokens that a data-parallel rank packs under any of the
        plans.

        Raises:
            DataError: as `tokens` does.
        """
        # In the order of the data: a Parquet file keeps one row group at a time.
        for sample in sorted(own_samples(plans, dp_rank), key=lambda one: int(rows[one])):
            batch.set_tokens(sample, *self.tokens(int(rows[sample])))


class _Memory:
    def __init__(self, records: Sequence[Rollout]) -> None:
        self._records = records

    def tokens(self, row: int) -> tuple[Ids, Ids]:
        return self._records[row].prompt_ids, self._records[row].response_ids


class _Files:
    """Reads single samples at the places that the index has."""

    def __init__(self, files: Sequence[Path], index: Index, settings: ReadSettings) -> None:
        self._files, self._index, self._settings = files, index, settings
        self._parser = settings.parser()
        self._readers: dict[int, SampleFile] = {}

    def tokens(self, row: int) -> tuple[Ids, Ids]:
        at = self._index[row]
        file = int(at["file"])
        if file not in self._readers:
            self._readers[file] = open_file(self._files[file])
        try:
            raw = self._readers[file].read(int(at["place"]))
            record = self._settings.read(self._parser, raw, "")
        except BadLine:
            record = None
        lengths = (int(at["prompt_tokens"]), int(at["response_tokens"]))
        if record is None or (len(record.prompt_ids), len(record.response_ids)) != lengths:
            raise DataError(
                f"{self._files[file]}:{at['number']}: is not the sample that was indexed; the "
                "file has changed during the run, start again"
            )
        return record.prompt_ids, record.response_ids


def _given(value: float) -> float | None:
    return None if value != value else value
