"""`SharedPrefixes`: the tokens that samples of a batch have in common at their beginnings.

Eight answers to one prompt begin with the same tokens, and so do the branches of a multi-turn
rollout. These samples form a tree. A tree needs two numbers per sample: its place in depth-first
order, and the tokens that it has in common with the sample before it. Any two samples then have the
smallest of the numbers between them in common. (This is how a suffix array with its longest common
prefixes stands for a suffix tree: Manber and Myers 1993, Kasai et al. 2001.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megapack.base.arrays import Ints, read_ids
from megapack.errors import DataError, brief

# Token ids are int32 here: no vocabulary has 2**31 ids.
_MAX_ID = 2**31 - 1


@dataclass(frozen=True)
class SharedPrefixes:
    """Tokens that samples have in common at their beginnings.

    Samples [5, 6, 7, 8], [1, 2] and [5, 6, 7, 9]:

    >>> SharedPrefixes.from_samples([[5, 6, 7, 8], [1, 2], [5, 6, 7, 9]])
    SharedPrefixes(order=(0, 2), common=(0, 3), own_tokens=1)
    """

    order: tuple[int, ...]
    """Indices of the samples that have tokens in common with another one. Those that have the most
    in common are neighbours: depth-first order of the tree."""
    common: tuple[int, ...]
    """Tokens that each sample of `order` has in common with the one before it; 0 for the first one
    of a tree."""
    own_tokens: int = 1
    """The last common tokens, which each sample keeps for itself. A position predicts the token
    after it, so the position of the last common token predicts a different token in each sample:
    with 3 common tokens, samples share 2 positions. Each layer of multi-token prediction reads one
    token more."""

    @classmethod
    def from_samples(
        cls,
        token_ids: Sequence[Any],
        *,
        routing: Sequence[Any] | None = None,
        mtp_num_layers: int = 0,
    ) -> SharedPrefixes:
        """Find common beginnings in token ids; O(n log n) comparisons of samples.

        Args:
            token_ids: per sample its ids: a list, an array, or a tensor on the CPU.
            routing: per sample the experts that a step replays, [tokens, MoE layers, experts per
                token], as for `ScheduleAdapter.step`. Samples share only tokens that go to the same
                experts. None: the routers choose.
            mtp_num_layers: layers of multi-token prediction of the model.

        Raises:
            DataError: ids that are not a flat sequence of integers from 0 to 2**31 - 1.
        """
        samples = [_read_ids(i, ids) for i, ids in enumerate(token_ids)]
        # Big-endian bytes have the order of the numbers, and bytes are compared by memcmp.
        keys = [ids.astype(">i4").tobytes() for ids in samples]
        order = sorted(range(len(samples)), key=keys.__getitem__)
        own_tokens = 1 + mtp_num_layers
        common = [0] * len(order)
        for k in range(1, len(order)):
            pair = (order[k - 1], order[k])
            common[k] = _num_equal(*(samples[i] for i in pair))
            if routing is not None and common[k] > own_tokens:
                agreed = _num_agreed([routing[i] for i in pair], common[k] - own_tokens)
                common[k] = min(common[k], agreed + own_tokens)
        return cls(tuple(order), tuple(common), own_tokens).trimmed()

    @classmethod
    def from_groups(
        cls,
        group_ids: Sequence[int | str],
        prompt_tokens: Sequence[int],
        *,
        mtp_num_layers: int = 0,
    ) -> SharedPrefixes:
        """Common prompts from lengths, where token ids are not at hand.

        Args:
            group_ids: per sample an int or str; samples with the same id have the same prompt.
            prompt_tokens: per sample the tokens of its prompt.

        Raises:
            DataError: prompts that are not integers, or samples of one group with prompts of
                different lengths.
        """
        lengths = _read_numbers("prompt_tokens", prompt_tokens)
        group_of, _ = read_ids("group", group_ids, lengths.size)
        order = np.argsort(group_of, kind="stable")
        same = np.diff(group_of[order], prepend=-1) == 0
        before = np.roll(order, 1)
        bad = np.flatnonzero(same & (lengths[order] != lengths[before]))
        if bad.size:
            first = int(before[bad[0]])
            second = int(order[bad[0]])
            raise DataError(
                f"samples {first} and {second} are of group {group_ids[first]!r} and have prompts "
                f"of {lengths[first]} and {lengths[second]} tokens; give groups of one prompt"
            )
        common = np.where(same, lengths[order], 0)
        own_tokens = 1 + mtp_num_layers
        return cls(tuple(order.tolist()), tuple(common.tolist()), own_tokens).trimmed()

    def trimmed(self) -> SharedPrefixes:
        """Without samples that share no position with another one."""
        common = np.array(self.common, dtype=np.int64)
        common[common <= self.own_tokens] = 0
        shares = common > 0
        kept = shares | np.append(shares[1:], False)
        order = np.array(self.order, dtype=np.int64)[kept]
        return SharedPrefixes(tuple(order.tolist()), tuple(common[kept].tolist()), self.own_tokens)

    def check(self, lengths: Ints) -> None:
        """Check that the samples can have these tokens in common.

        Args:
            lengths: int64 [n], tokens of each sample of the batch.

        Raises:
            DataError: fields that are not integers, an unknown or repeated sample, or more common
                tokens than a sample has.
        """
        order = _read_numbers("order", self.order)
        common = _read_numbers("common", self.common)
        if order.size != common.size or type(self.own_tokens) is not int or self.own_tokens < 1:
            raise DataError(
                f"prefixes of {order.size} samples with {common.size} numbers of common tokens and "
                f"own_tokens={brief(self.own_tokens)}; make them with SharedPrefixes.from_samples"
            )
        if not order.size:
            return
        if order.min() < 0 or order.max() >= lengths.size or np.bincount(order).max() > 1:
            raise DataError(
                f"prefixes of {order.size} samples numbered {order.min()} to {order.max()} for a "
                f"batch of {lengths.size}; give each sample at most once"
            )
        own = lengths[order]
        most = np.minimum(own, np.roll(own, 1))
        most[0] = 0
        bad = np.flatnonzero((common < 0) | (common > most))
        if bad.size:
            k = int(bad[0])
            raise DataError(
                f"sample {order[k]} of {own[k]} tokens has {common[k]} in common with the sample "
                f"before it, which can be at most {most[k]}; make the prefixes of this batch"
            )


def _read_numbers(name: str, numbers: Any) -> Ints:
    """A field as int64; other types, and integers beyond int64, are refused."""
    try:
        flat = np.asarray(numbers)
    except ValueError:
        flat = np.zeros(1)
    if flat.ndim != 1 or (flat.size and flat.dtype.kind not in "iu"):
        raise DataError(f"prefixes with {name}={brief(numbers)}; give a tuple of integers")
    return flat.astype(np.int64)


def _read_ids(sample: int, ids: Any) -> npt.NDArray[Any]:
    flat = np.asarray(ids)
    if flat.ndim != 1 or (flat.size and flat.dtype.kind not in "iu"):
        raise DataError(f"sample {sample} has token ids {brief(ids)}; give a flat list of integers")
    if flat.size and not (int(flat.min()) >= 0 and int(flat.max()) <= _MAX_ID):
        raise DataError(
            f"sample {sample} has token ids from {flat.min()} to {flat.max()}; give ids from 0 to "
            f"{_MAX_ID}"
        )
    return flat


def _num_equal(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> int:
    """Number of equal elements at the beginnings of two arrays.

    >>> _num_equal(np.array([5, 6, 7]), np.array([5, 6, 8, 9]))
    2
    """
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    at = int(differs.argmax()) if size else 0
    return at if size and differs[at] else size


def _num_agreed(routes: Sequence[Any], num_tokens: int) -> int:
    """First tokens of two samples that go to the same experts, at most `num_tokens`.

    The order of a token's experts does not matter.
    """
    if any(route is None for route in routes):
        return 0
    first, second = (np.sort(np.asarray(route[:num_tokens]), axis=-1) for route in routes)
    differs = (first != second).reshape(num_tokens, -1).any(axis=1)
    at = int(differs.argmax())
    return at if differs[at] else num_tokens
