"""Inputs of the planner, checked and turned into arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from megapack.errors import ConfigError, DataError, brief
from megapack.layout import Layout

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Sums of squared lengths are int64. The longest sample adds (2**28)**2 = 2**56, so 127 of them fit.
MAX_LENGTH = 2**28
# Compiled code multiplies budgets by cp, at most 2**20, as int64: 2**40 * 2**20 = 2**60.
_MAX_COUNT = 2**40


def read_lengths(lengths: Sequence[int] | Ints) -> Ints:
    """Sample lengths as int64 [n].

    Raises:
        DataError: not a flat, non-empty sequence of integers in [1, MAX_LENGTH].
    """
    flat = np.asarray(lengths) if isinstance(lengths, np.ndarray) else _from_sequence(lengths)
    if flat.ndim != 1 or flat.size == 0:
        raise DataError(f"lengths of shape {flat.shape}; give one integer per sample, at least one")
    if flat.dtype.kind not in "iu":
        raise DataError(f"lengths are {flat.dtype}; give integers")
    bad = np.flatnonzero((flat < 1) | (flat > MAX_LENGTH))
    if bad.size:
        raise _out_of_range(int(bad[0]), int(flat[bad[0]]))
    return flat.astype(np.int64)


def _out_of_range(sample: int, length: int) -> DataError:
    return DataError(
        f"sample {sample} has length {brief(length)}; give lengths in [1, {MAX_LENGTH}]"
    )


def _from_sequence(lengths: Any) -> npt.NDArray[Any]:
    try:
        values = list(lengths)
    except TypeError:
        raise DataError(f"lengths are {brief(lengths)}; give one integer per sample") from None
    for i, value in enumerate(values):
        if type(value) is not int and not isinstance(value, np.integer):
            raise DataError(f"sample {i} has length {brief(value)}; give an integer")
        # Checked before np.array, which fails on integers of more than 64 bits.
        if not 1 <= value <= MAX_LENGTH:
            raise _out_of_range(i, int(value))
    return np.array(values, dtype=np.int64)


Ids = tuple[int | str, ...]


def is_id(value: object) -> TypeGuard[int | str]:
    """Whether the value is a string or fits in int64. Python may refuse to print larger ints."""
    if isinstance(value, int) and not isinstance(value, bool):
        return -(2**63) <= value < 2**63
    return isinstance(value, str)


def read_ids(
    kind: str, given: Sequence[int | str] | None, num_samples: int
) -> tuple[Ints, Ids | None]:
    """Number the samples' sets in order of first appearance, and check the ids.

    The ids ["b", "a", "b"] give set_of = [0, 1, 0].

    Args:
        kind: "rollout", "colocate" or "adapter", for messages.
        given: one id per sample; None: each sample is its own set.

    Returns:
        set_of: int64 [n], the number of each sample's set.
        ids: one int or str per sample; None if `given` is None.

    Raises:
        DataError: the number of ids is not the number of samples, or an id is neither int64 nor
            str.
    """
    if given is None:
        return np.arange(num_samples, dtype=np.int64), None
    # Sets have another order in another process.
    is_unordered = isinstance(given, str | bytes | set | frozenset | dict)
    if is_unordered or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        raise DataError(f"{kind}_ids are {brief(given)}; give one id per sample")
    ids = tuple(read_id(f"sample {i} has {kind} id", value) for i, value in enumerate(given))
    if len(ids) != num_samples:
        raise DataError(f"{len(ids)} {kind}_ids for {num_samples} samples; give one per sample")
    number = {name: k for k, name in enumerate(dict.fromkeys(ids))}
    return np.array([number[name] for name in ids], dtype=np.int64), ids


def read_adapters(given: Sequence[int | str] | None, num_samples: int) -> tuple[Ints, Ids | None]:
    """Number the samples' adapters: integers ascending, then strings.

    The ids [7, "b", 3] give adapter_of = [1, 2, 0].

    Args:
        given: one id per sample; None: all have the same adapter, or none.

    Returns:
        adapter_of: int64 [n], the number of each sample's adapter.
        ids: as `read_ids` returns them.

    Raises:
        DataError: see `read_ids`.
    """
    _, ids = read_ids("adapter", given, num_samples)
    if ids is None:
        return np.zeros(num_samples, dtype=np.int64), None
    names = sorted(set(ids), key=lambda name: (isinstance(name, str), name))
    number = {name: k for k, name in enumerate(names)}
    return np.array([number[i] for i in ids], dtype=np.int64), ids


def read_sets(
    rollout_ids: Sequence[int | str] | None,
    colocate_ids: Sequence[int | str] | None,
    num_samples: int,
) -> tuple[Ints, Ids | None, Ints, Ids | None]:
    """Rollouts and colocated sets of the samples, each as `read_ids` returns them.

    Without rollout ids, each colocated set is a rollout.

    Returns:
        rollout_of, rollout ids, colocated_of, colocate ids.

    Raises:
        DataError: invalid ids, or a colocated set in more than one rollout.
    """
    colocated_of, colocate = read_ids("colocate", colocate_ids, num_samples)
    rollout_of, rollouts = read_ids("rollout", rollout_ids, num_samples)
    if rollouts is None:
        return colocated_of, colocate, colocated_of, colocate
    why = " may train in different steps; give them one rollout id, or leave rollout_ids out"
    check_sets(colocated_of, colocate, rollout_of, rollouts, "rollout", why)
    return rollout_of, rollouts, colocated_of, colocate


def check_sets(
    set_of: Ints, colocate: Ids | None, other_of: Ints, others: Ids | None, kind: str, why: str
) -> None:
    """Raise DataError if a colocated set is in several others, such as rollouts; see `read_sets`.

    Args:
        kind, why: for the message.
    """
    _, first = np.unique(set_of, return_index=True)
    torn = np.flatnonzero(other_of != other_of[first[set_of]])
    if torn.size and colocate and others:
        sample = int(torn[0])
        other = int(first[set_of[sample]])
        raise DataError(
            f"samples {other} and {sample} share the colocate id {colocate[sample]!r} but not the "
            f"{kind}: {brief(others[other])} and {brief(others[sample])}{why}"
        )


def read_id(where: str, value: object) -> int | str:
    """An id of Python's types; DataError, whose message begins with `where`, if it is none."""
    value = int(value) if isinstance(value, np.integer) else value
    if not is_id(value):
        raise DataError(f"{where} {brief(value)}; give an int64 or a str")
    # np.str_ is a subclass of str; plans and their JSON hold plain strings.
    return str(value) if isinstance(value, str) else value


def read_budget(
    layout: Layout, max_tokens_per_gpu: int | None, micro_batch_size: int | None
) -> int | None:
    """The budget: padded tokens that a row may hold per DP rank; None for count-based plans.

    It is a multiple of the row alignment: 100 tokens with alignment 16 become 96.

    Raises:
        ConfigError: both or neither given, not positive, or a budget below the row alignment.
    """
    if (max_tokens_per_gpu is None) == (micro_batch_size is None):
        given = "neither" if max_tokens_per_gpu is None else "both"
        raise ConfigError(
            f"{given} of max_tokens_per_gpu and micro_batch_size given; set exactly one of them"
        )
    check_count("micro_batch_size", micro_batch_size)
    check_count("max_tokens_per_gpu", max_tokens_per_gpu)
    if max_tokens_per_gpu is None:
        return None
    capacity = layout.longest_row(int(max_tokens_per_gpu) * layout.cp)
    if not capacity:
        unit = layout.aligned_row_tokens(1)
        raise ConfigError(
            f"max_tokens_per_gpu={max_tokens_per_gpu} with cp={layout.cp} is less than the row "
            f"alignment of {unit} tokens; set it to {-(-unit // layout.cp)} or more"
        )
    return capacity


def check_count(name: str, value: Any) -> None:
    """Raise ConfigError if a size is not an integer in [1, 2**40]; None passes."""
    if value is None:
        return
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or value < 1:
        raise ConfigError(f"{name}={brief(value)}; set an integer of at least 1")
    if value > _MAX_COUNT:
        raise ConfigError(f"{name}={brief(value)}; set an integer of at most {_MAX_COUNT}")
