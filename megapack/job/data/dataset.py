"""A data set: lengths, rollouts and rewards of all samples; tokens are read sample by sample."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megapack.base.arrays import Ints
from megapack.errors import DataError
from megapack.job.data.advantages import SampleReward
from megapack.job.data.index import StoredSamples, load_samples, store_in_memory
from megapack.job.data.rollouts import Rollout
from megapack.job.data.token_blocks import Index, ReadSettings
from megapack.plan.plan import Plan, own_samples

if TYPE_CHECKING:
    from megapack.samples import SampleBatch

SampleNumbers = npt.NDArray[np.int64]
"""Numbers of samples in a data set, from 0, in the order of its files."""


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset(StoredSamples):
    """Samples by number, in the order of their files; see `data.index`."""

    num_dropped_groups: int = 0
    """Prompt groups that `without_equal_rewards` left out."""

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def from_files(
        cls,
        path: str | Path,
        settings: ReadSettings,
        spare_folder: Path,
        num_workers: int | None = 1,
    ) -> Dataset:
        """The samples of `data.path`; arguments and errors are those of `load_samples`."""
        return cls(**vars(load_samples(path, settings, spare_folder, num_workers)))

    @classmethod
    def from_rollouts(cls, records: Sequence[Rollout]) -> Dataset:
        """A data set of samples that are in memory."""
        return cls(**vars(store_in_memory(records)))

    def without_equal_rewards(self) -> Dataset:
        """The prompt groups whose samples do not all have the same reward, in the same order.

        Groups of one rollout, and groups with an advantage or a missing reward, are kept.

        Raises:
            DataError: no group is left.
        """
        group = self.index["group"]
        rows = self.index[~_with_equal_rewards(self.index)[group]]
        num_groups = len(np.unique(group))
        if len(rows) == 0:
            raise DataError(
                f"each of the {num_groups} prompt groups has equal rewards; set "
                "data.drop_equal_rewards=false"
            )
        for name in ("group", "rollout"):
            # The numbers of those that are left, by first appearance as before.
            rows[name] = np.unique(rows[name], return_inverse=True)[1]
        num_dropped = num_groups - len(np.unique(rows["group"]))
        return dataclasses.replace(self, index=rows, num_dropped_groups=num_dropped)

    def digest(self) -> str:
        """A digest of the samples' lengths, loss tokens, pairs, prompt groups and rollouts, which
        decide plans and loss weights; a space; and a digest of all that is trained."""
        digest = hashlib.sha256()
        tokens = ("prompt_tokens", "response_tokens", "loss_tokens")
        for name in (*tokens, "pair_sign", "group", "rollout"):
            digest.update(self.index[name].tobytes())
        return f"{digest.hexdigest()} {self.samples_digest}"

    @property
    def lengths(self) -> Ints:
        """Tokens of each sample, prompt and response: int64 [samples]."""
        index = self.index
        lengths: Ints = index["prompt_tokens"].astype(np.int64) + index["response_tokens"]
        return lengths

    def prompt_tokens(self, numbers: SampleNumbers) -> list[int]:
        """Tokens of each sample's prompt."""
        return self.index["prompt_tokens"][numbers].tolist()  # type: ignore[no-any-return]

    def response_tokens(self, numbers: SampleNumbers) -> list[int]:
        """Tokens of each sample's response."""
        return self.index["response_tokens"][numbers].tolist()  # type: ignore[no-any-return]

    def loss_tokens(self, numbers: SampleNumbers) -> list[int]:
        """Response tokens of each sample that count in the loss; its first token never does."""
        return self.index["loss_tokens"][numbers].tolist()  # type: ignore[no-any-return]

    def pair_signs(self, numbers: SampleNumbers) -> list[int]:
        """1 for the preferred sample of a pair, -1 for the other one, 0 for all others.

        Both samples of a pair have the same rollout.
        """
        return self.index["pair_sign"][numbers].tolist()  # type: ignore[no-any-return]

    def pair_ids(self, numbers: SampleNumbers) -> list[int] | None:
        """Each sample's pair, numbered from 0 by first appearance among these samples.

        None if the samples are in no pairs. A pair's preferred sample comes right before the other
        one in the data set.
        """
        signs = self.index["pair_sign"][numbers]
        if not signs.any():
            return None
        ids: dict[int, int] = {}
        preferred = np.where(signs < 0, numbers - 1, numbers).tolist()
        return [ids.setdefault(number, len(ids)) for number in preferred]

    def lines(self, numbers: SampleNumbers) -> list[tuple[int, int, int]]:
        """Where each sample comes from: number of the file from 0, line or row from 1, and number
        of the sample within it from 0."""
        columns = [self.index[name][numbers].tolist() for name in ("file", "number", "part")]
        return list(zip(*columns, strict=True))

    def rollout_ids(self, numbers: SampleNumbers) -> list[int]:
        """Each sample's rollout, numbered from 0 by first appearance among these samples."""
        ids: dict[int, int] = {}
        rollouts = self.index["rollout"][numbers].tolist()
        return [ids.setdefault(rollout, len(ids)) for rollout in rollouts]

    def num_groups(self, numbers: SampleNumbers) -> int:
        """Number of prompt groups among these samples."""
        return len(np.unique(self.index["group"][numbers]))

    def num_rollouts(self, numbers: SampleNumbers) -> int:
        """Number of rollouts among these samples."""
        return len(np.unique(self.index["rollout"][numbers]))

    def rewards(self, numbers: SampleNumbers) -> list[SampleReward]:
        """Prompt group, rollout, reward and advantage of each sample."""
        names = ("group", "rollout", "reward", "advantage")
        columns = [self.index[name][numbers].tolist() for name in names]
        return [
            SampleReward(group, rollout, _none_if_nan(reward), _none_if_nan(advantage))
            for group, rollout, reward, advantage in zip(*columns, strict=True)
        ]

    def give_tokens(
        self, batch: SampleBatch, numbers: SampleNumbers, plans: Sequence[Plan], dp_rank: int
    ) -> None:
        """Set those tokens of a batch that a data-parallel rank packs under any of the plans.

        Args:
            numbers: number in this data set of each of the batch's samples.
        """
        for sample in own_samples(plans, dp_rank):
            tokens = self.tokens(int(numbers[sample]))
            batch.set_tokens(sample, tokens.prompt_ids, tokens.response_ids, tokens.loss_mask)


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


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
