"""Batches of about equal work, by exchanges of prompt groups between them."""

from __future__ import annotations

import numpy as np

from megapack.base.arrays import Ints

# Stop when the lightest batch has at most this part of the heaviest one's work less: 1 ms of 1 s.
_EVEN = 1000
# 128 samples of a long tail are even after one pass, 32 after about two. Batches of a few groups,
# and one with a group of more work than a batch's share, never are.
_MOST_PASSES = 8


def even_batches(work: Ints) -> Ints:
    """Exchange prompt groups between batches until the batches' work is about equal.

    A pass takes the k-th groups of all batches, for one k after the other. The one of most work
    goes to the batch whose other groups have the least, and so on: no other way to give these out
    leaves less variance between batches. It is the rearrangement algorithm of Puccetti and
    Rüschendorf (Journal of Computational and Applied Mathematics 236, 2012). After a pass each
    batch is rotated by its number, so that other groups are the k-th. All sums are of integers, and
    so equal on every rank and machine.

    >>> even_batches(np.array([[9, 8], [1, 2]]))
    array([[1, 3],
           [0, 2]])

    Args:
        work: int64 [batches, groups], of the prompt groups of each batch.

    Returns:
        int64 [batches, groups], the groups of each batch afterwards, ascending: numbers from 0 in
        the order of `work`, batch after batch.
    """
    num_batches, num_groups = work.shape
    found = np.arange(work.size).reshape(work.shape)
    rotated = (np.arange(num_groups) + np.arange(num_batches)[:, None]) % num_groups
    flat = work.ravel()
    sums = work.sum(axis=1)
    for _ in range(_MOST_PASSES):
        if (sums.max() - sums.min()) * _EVEN <= sums.max():
            break
        for column in found.T:
            sums -= flat[column]
            lightest = np.argsort(sums, kind="stable")
            column[lightest] = column[np.argsort(-flat[column], kind="stable")]
            sums += flat[column]
        found = np.take_along_axis(found, rotated, axis=1)
    return np.sort(found, axis=1)
