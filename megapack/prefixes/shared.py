"""`SharedPrefixes`: the tokens that samples of a batch have in common at their beginnings.

Eight answers to one prompt begin with the same tokens, and so do the branches of a multi-turn
rollout. These samples form a tree. A tree needs two numbers per sample: its place in depth-first
order, and the tokens that it has in common with the sample before it. Any two samples then have the
smallest of the numbers between them in common. (This is how a suffix array with its longest common
prefixes stands for a suffix tree: Manber and Myers 1993, Kasai et al. 2001.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megapack.base.arrays import Ints, read_ids
from megapack.errors import ConfigError, DataError, brief
from megapack.images import ImageNumbers, Images, checked_images

# Token ids are int32 here: no vocabulary has 2**31 ids.
_MAX_ID = 2**31 - 1
_ID_DTYPE = np.dtype(">i4")
_ID_BYTES = _ID_DTYPE.itemsize

# Tokens that are compared at a time. With more, samples are read further than they agree; with
# fewer, long common beginnings need more steps of Python.
_PIECE = 256

Reader = Callable[[int, int, int], npt.NDArray[Any]]
"""(sample, first, last) -> the sample's token ids from `first` to `last`."""


@dataclass(frozen=True)
class SharedPrefixes:
    """The tokens that samples have in common at their beginnings, such as a group's prompt.

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
    token more. Without these, a sample that the next one begins with keeps none: after its end it
    predicts nothing."""

    @classmethod
    def from_samples(
        cls,
        token_ids: Sequence[Any],
        *,
        routing: Sequence[Any] | None = None,
        mtp_num_layers: int = 0,
        images: Sequence[Images] | None = None,
    ) -> SharedPrefixes:
        """Find what samples have in common from their token ids.

        Args:
            token_ids: per sample its ids: list, array, or CPU tensor.
            images: per sample its `ImageRef`s: samples share an image's tokens only if they have
                the same image there. None: samples have no images.
            routing: the experts that a step replays, as for `ScheduleAdapter.step`. Samples share
                only tokens that go to the same experts, in any order. None: the routers choose.
            mtp_num_layers: the model's layers of multi-token prediction.

        Raises:
            DataError: ids that are not flat sequences of integers from 0 to 2**31 - 1, or routing
                of other shapes.
            ConfigError: mtp_num_layers is not an integer of at least 0.
        """
        if not isinstance(token_ids, Sized):
            raise DataError(f"token_ids are {brief(token_ids)}; give the ids of each sample")
        if routing is not None and len(routing) != len(token_ids):
            raise DataError(
                f"routing of {len(routing)} samples for {len(token_ids)}; give one entry per "
                "sample, None for samples that share nothing"
            )
        samples = [_read_ids(i, ids) for i, ids in enumerate(token_ids)]
        if images is not None:
            refs, numbers = checked_images(images, list(map(len, samples))), ImageNumbers()
            samples = list(map(numbers.compared, samples, refs))
        return cls.from_reader(
            len(samples),
            lambda i, first, last: samples[i][first:last],
            routing=routing,
            mtp_num_layers=mtp_num_layers,
        )

    @classmethod
    def from_reader(
        cls,
        num_samples: int,
        read: Reader,
        *,
        routing: Sequence[Any] | None = None,
        mtp_num_layers: int = 0,
    ) -> SharedPrefixes:
        """Find common beginnings in token ids that are read only as far as samples agree.

        Args:
            read: gives a sample's ids from one position to another as an array of integers; fewer
                or none after its end.
            routing, mtp_num_layers: see `from_samples`. A sample's routes are read by slices.
        """
        own_tokens = _own_tokens(mtp_num_layers)
        # A sample without routes shares nothing, and would stand between others that do.
        members = [i for i in range(num_samples) if routing is None or routing[i] is not None]
        order, common = _depth_first(members, read)
        if routing is not None:
            # Lengths of samples that others begin with, which share all of their tokens.
            whole = set[int]()
            for k in range(1, len(order)):
                if common[k] > own_tokens:
                    pair = (order[k - 1], order[k])
                    if not len(read(pair[0], common[k], common[k] + 1)):
                        whole.add(common[k])
                    # An engine never runs the last token of a sample.
                    most = min(common[k], *(len(routing[i]) for i in pair))
                    most = max(most, common[k] - own_tokens)
                    agreed = _num_agreed(routing, pair, most)
                    if agreed < most:
                        ends = [length - 1 for length in whole if length > agreed]
                        common[k] = min(common[k], agreed + own_tokens, *ends)
        return cls(tuple(order), tuple(common), own_tokens).trimmed()

    @classmethod
    def from_groups(
        cls,
        group_ids: Sequence[int | str],
        prompt_tokens: Sequence[int],
        *,
        mtp_num_layers: int = 0,
    ) -> SharedPrefixes:
        """Tell which samples have one prompt, where token ids are not at hand.

        Args:
            group_ids: per sample an int or str; samples of one id have the same prompt.
            prompt_tokens: per sample the number of tokens of its prompt.
            mtp_num_layers: the model's layers of multi-token prediction.

        Raises:
            DataError: samples of one group with prompts of different lengths.
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
        own_tokens = _own_tokens(mtp_num_layers)
        return cls(tuple(order.tolist()), tuple(common.tolist()), own_tokens).trimmed()

    def apart(self, group_of: Ints) -> SharedPrefixes:
        """The prefixes of samples that share only within their groups, such as those of an adapter:
        equal tokens have other hidden states under another adapter.

        Args:
            group_of: int64 [n], the group of each sample of the batch.

        >>> SharedPrefixes((0, 1, 2, 3), (0, 5, 3, 4)).apart(np.array([0, 1, 0, 1]))
        SharedPrefixes(order=(0, 2, 1, 3), common=(0, 3, 0, 3), own_tokens=1)
        """
        order = np.array(self.order, dtype=np.int64)
        turned = np.argsort(group_of[order], kind="stable")
        is_first = np.diff(group_of[order[turned]], prepend=-1) != 0
        # A sample has with the one before it in its group the least in common of all from there.
        starts = np.where(is_first, turned, np.roll(turned, 1) + 1)
        spans = np.stack([starts, turned + 1], axis=1).ravel()
        padded = np.append(np.array(self.common, dtype=np.int64), 0)
        common = np.minimum.reduceat(padded, spans)[::2]
        common[is_first] = 0
        apart = replace(self, order=tuple(order[turned].tolist()), common=tuple(common.tolist()))
        return apart.trimmed()

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


def _own_tokens(mtp_num_layers: int) -> int:
    if type(mtp_num_layers) is not int or mtp_num_layers < 0:
        raise ConfigError(f"mtp_num_layers={brief(mtp_num_layers)}; set an integer of at least 0")
    return 1 + mtp_num_layers


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


def _depth_first(samples: list[int], read: Reader) -> tuple[list[int], list[int]]:
    """Samples in depth-first order, and what each has in common with the one before it.

    Samples are split by their next `_PIECE` tokens until each is alone: 2,048 samples of 8,000
    tokens of which groups of 16 have 1,000 in common are read up to token 1,024 only.
    """
    order: list[int] = []
    common: list[int] = []
    # Samples that have `depth` tokens in common, and what the first of them has in common with the
    # sample before it; the next run last.
    runs = [(samples, 0, 0)] if samples else []
    while runs:
        members, depth, before = runs.pop()
        if len(members) == 1:
            order += members
            common.append(before)
            continue
        parts: dict[bytes, list[int]] = {}
        for i in members:
            parts.setdefault(_key(read(i, depth, depth + _PIECE)), []).append(i)
        # Bytes are compared by memcmp; a sample that ends comes before those that go on.
        pieces = sorted(parts)
        starts = [before, *(depth + _num_equal(*pair) for pair in itertools.pairwise(pieces))]
        split = []
        for piece, start in zip(pieces, starts, strict=True):
            end = depth + len(piece) // _ID_BYTES
            if end == depth + _PIECE:
                split.append((parts[piece], end, start))
            else:
                # They end here, so they are equal.
                first, *others = parts[piece]
                split += [([first], end, start), *(([i], end, end) for i in others)]
        runs += reversed(split)
    return order, common


def _key(ids: npt.NDArray[Any]) -> bytes:
    # Big-endian bytes have the order of the numbers.
    return ids.astype(_ID_DTYPE).tobytes()


def _num_equal(first: bytes, second: bytes) -> int:
    """Number of equal ids at the beginnings of two keys.

    >>> _num_equal(_key(np.array([5, 6, 7])), _key(np.array([5, 6, 8, 9])))
    2
    """
    size = min(len(first), len(second))
    differs = np.frombuffer(first[:size], _ID_DTYPE) != np.frombuffer(second[:size], _ID_DTYPE)
    return int(differs.argmax()) if differs.any() else differs.size


def _num_agreed(routing: Sequence[Any], pair: tuple[int, int], num_tokens: int) -> int:
    """First tokens of two samples that go to the same experts, at most `num_tokens`.

    The order of a token's experts does not matter, because the layer adds up their outputs. Where
    two experts have nearly the same score, an inference engine may name either first.
    """
    first, second = (np.asarray(routing[i][:num_tokens]) for i in pair)
    if first.shape != second.shape or first.ndim != 3 or len(first) < num_tokens:
        raise DataError(
            f"samples {pair[0]} and {pair[1]} have routing {first.shape} and {second.shape} for "
            f"{num_tokens} common tokens; give each [tokens, MoE layers, experts per token]"
        )
    differs = (first != second).any(axis=(1, 2))
    (unequal,) = differs.nonzero()
    # Sorting is slow, and few tokens need it.
    differs[unequal] = (np.sort(first[unequal]) != np.sort(second[unequal])).any(axis=(1, 2))
    at = int(differs.argmax())
    return at if differs[at] else num_tokens
