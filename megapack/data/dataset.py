"""A data set: lengths, rollouts and rewards of all samples; tokens are read sample by sample."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megapack.data.advantages import SampleReward
from megapack.data.files import BadLine, SampleFile, list_files, open_file
from megapack.data.index import INDEX_DTYPE, Index, ReadSettings, load_index
from megapack.data.rollouts import Rollout, group_batches
from megapack.data.tokenizer import Ids
from megapack.errors import DataError
from megapack.plan.plan import Plan, own_samples

SampleNumbers = npt.NDArray[np.int64]
"""Numbers of samples in a data set, from 0, in the order of its files."""


class TokenSink(Protocol):
    """Receives tokens; `samples.SampleBatch`, without importing torch."""

    def set_tokens(self, sample: int, prompt: Ids, response: Ids) -> None:
        """Set the tokens of one sample."""
        ...


class TokenSource(Protocol):
    """Returns the tokens of single samples."""

    def tokens(self, number: int) -> tuple[Ids, Ids]:
        """Prompt and response of one sample."""
        ...


class Dataset:
    """Samples by number, in the order of their files.

    Args:
        index: one row per sample, see `data.index`.
        source: reads the tokens.
    """

    def __init__(self, index: Index, source: TokenSource) -> None:
        self._index = index
        self._source = source
        self.num_dropped_groups = 0
        """Prompt groups that `without_equal_rewards` left out."""

    def __len__(self) -> int:
        return len(self._index)

    @classmethod
    def from_files(cls, path: str | Path, settings: ReadSettings, spare_folder: Path) -> Dataset:
        """The samples of `data.path`; arguments and errors are those of `load_index`."""
        index = load_index(path, settings, spare_folder)
        return cls(index, _Files(list_files(path), index, settings))

    @classmethod
    def from_rollouts(cls, records: Sequence[Rollout]) -> Dataset:
        """A data set of samples that are in memory."""
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

    def without_equal_rewards(self) -> Dataset:
        """The prompt groups whose samples do not all have the same reward, in the same order.

        Groups of one rollout, and groups with an advantage or a missing reward, are kept.

        Raises:
            DataError: no group is left.
        """
        index = self._index
        kept = np.flatnonzero(~_with_equal_rewards(index)[index["group"]])
        if len(kept) == 0:
            raise DataError(
                f"each of the {len(np.unique(index['group']))} prompt groups has equal rewards; "
                "set data.drop_equal_rewards=false"
            )
        rows = index[kept]
        for name in ("group", "rollout"):
            # The numbers of those that are left, by first appearance as before.
            rows[name] = np.unique(rows[name], return_inverse=True)[1]
        data = Dataset(rows, _Chosen(self._source, kept))
        data.num_dropped_groups = len(np.unique(index["group"])) - len(np.unique(rows["group"]))
        return data

    def digest(self) -> str:
        """A digest of all samples' lengths, prompt groups and rollouts, which decide the plans."""
        digest = hashlib.sha256()
        for name in ("prompt_tokens", "response_tokens", "group", "rollout"):
            digest.update(self._index[name].tobytes())
        return digest.hexdigest()

    def batches(
        self, prompts_per_batch: int, *, shuffle: bool = False, seed: int = 0, epoch: int = 0
    ) -> Iterator[SampleNumbers]:
        """Sample numbers in batches of whole prompt groups, see `rollouts.group_batches`."""
        return group_batches(
            self._index["group"], prompts_per_batch, shuffle=shuffle, seed=seed, epoch=epoch
        )

    def prompt_tokens(self, numbers: SampleNumbers) -> list[int]:
        """Tokens of each sample's prompt."""
        return self._index["prompt_tokens"][numbers].tolist()  # type: ignore[no-any-return]

    def response_tokens(self, numbers: SampleNumbers) -> list[int]:
        """Tokens of each sample's response."""
        return self._index["response_tokens"][numbers].tolist()  # type: ignore[no-any-return]

    def rollout_ids(self, numbers: SampleNumbers) -> list[int]:
        """Each sample's rollout, numbered from 0 by first appearance among these samples."""
        ids: dict[int, int] = {}
        rollouts = self._index["rollout"][numbers].tolist()
        return [ids.setdefault(rollout, len(ids)) for rollout in rollouts]

    def num_rollouts(self, numbers: SampleNumbers) -> int:
        """Number of rollouts among these samples."""
        return len(np.unique(self._index["rollout"][numbers]))

    def rewards(self, numbers: SampleNumbers) -> list[SampleReward]:
        """Prompt group, rollout, reward and advantage of each sample."""
        names = ("group", "rollout", "reward", "advantage")
        columns = [self._index[name][numbers].tolist() for name in names]
        return [
            SampleReward(group, rollout, _none_if_nan(reward), _none_if_nan(advantage))
            for group, rollout, reward, advantage in zip(*columns, strict=True)
        ]

    def tokens(self, number: int) -> tuple[Ids, Ids]:
        """Read prompt and response of one sample.

        Raises:
            DataError: the file has changed since it was indexed.
        """
        return self._source.tokens(number)

    def give_tokens(
        self, batch: TokenSink, numbers: SampleNumbers, plans: Sequence[Plan], dp_rank: int
    ) -> None:
        """Set those tokens of a batch that a data-parallel rank packs under any of the plans.

        Args:
            numbers: number in this data set of each of the batch's samples.

        Raises:
            DataError: as `tokens` does.
        """
        # Read in the order of the files: a Parquet reader keeps one row group in memory.
        for sample in sorted(own_samples(plans, dp_rank), key=lambda i: int(numbers[i])):
            batch.set_tokens(sample, *self.tokens(int(numbers[sample])))


def _with_equal_rewards(index: Index) -> npt.NDArray[np.bool_]:
    """Per prompt group: whether it has several rollouts, and one reward for all its samples."""
    group = index["group"]
    num_groups = int(group.max()) + 1
    lowest = np.full(num_groups, np.inf)
    highest = np.full(num_groups, -np.inf)
    # A reward that is not given is NaN, which no number equals.
    np.minimum.at(lowest, group, index["reward"])
    np.maximum.at(highest, group, index["reward"])
    has_advantage = np.zeros(num_groups, dtype=bool)
    np.logical_or.at(has_advantage, group, ~np.isnan(index["advantage"]))
    _, first = np.unique(index["rollout"], return_index=True)
    num_rollouts = np.bincount(group[first], minlength=num_groups)
    equal: npt.NDArray[np.bool_] = (lowest == highest) & (num_rollouts > 1) & ~has_advantage
    return equal


class _Chosen:
    """Some samples of another source, under new numbers."""

    def __init__(self, source: TokenSource, numbers: SampleNumbers) -> None:
        self._source = source
        self._numbers = numbers

    def tokens(self, number: int) -> tuple[Ids, Ids]:
        return self._source.tokens(int(self._numbers[number]))


class _Memory:
    def __init__(self, records: Sequence[Rollout]) -> None:
        self._records = records

    def tokens(self, number: int) -> tuple[Ids, Ids]:
        record = self._records[number]
        return record.prompt_ids, record.response_ids


class _Files:
    """Reads single samples from their positions in the files."""

    def __init__(self, files: Sequence[Path], index: Index, settings: ReadSettings) -> None:
        self._files = files
        self._index = index
        self._settings = settings
        self._parser = settings.parser()
        self._readers: dict[int, SampleFile] = {}

    def tokens(self, number: int) -> tuple[Ids, Ids]:
        entry = self._index[number]
        file = int(entry["file"])
        if file not in self._readers:
            self._readers[file] = open_file(self._files[file])
        try:
            raw = self._readers[file].read(int(entry["place"]))
            record = self._settings.read(self._parser, raw, "")
        except BadLine:
            record = None
        lengths = (int(entry["prompt_tokens"]), int(entry["response_tokens"]))
        if record is None or (len(record.prompt_ids), len(record.response_ids)) != lengths:
            raise DataError(
                f"{self._files[file]}:{entry['number']}: is not the sample that was indexed; the "
                "file has changed during the run, start again"
            )
        return record.prompt_ids, record.response_ids


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
