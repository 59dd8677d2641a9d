"""`RolloutQueue`: steps of exactly so many rollouts, from rollouts that finish in any order."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Generic, TypeVar

from megapack.base.arrays import check_count, read_id
from megapack.errors import DataError, brief

Sample = TypeVar("Sample")


class RolloutQueue(Generic[Sample]):
    """Collects finished rollouts until they fill an optimizer step.

        queue = RolloutQueue(global_batch_size=64)
        while (step := queue.take()) is None:
            queue.add(*finished.get())  # a rollout's name, and its samples

    The order in which rollouts arrive is known to one process. That one has the queue, and sends
    what it takes to all ranks, for example by `torch.distributed.broadcast_object_list`: with the
    same samples in the same order they make the same plan. A rollout is in one step, with all of
    its samples; those that fill no step wait for the next one.

    Args:
        global_batch_size: rollouts of a step, whatever the number of their samples.

    Raises:
        ConfigError: it is not an integer of at least 1.
    """

    def __init__(self, global_batch_size: int) -> None:
        check_count("global_batch_size", 0 if global_batch_size is None else global_batch_size)
        self.global_batch_size = global_batch_size
        self._waiting: dict[int | str, Sequence[Sample]] = {}

    def __len__(self) -> int:
        """Rollouts that wait."""
        return len(self._waiting)

    def add(self, rollout: int | str, samples: Sequence[Sample]) -> None:
        """Add a finished rollout, behind those that wait.

        Args:
            rollout: its name, one of `rollout_ids` of the plan.
            samples: all of its samples, in order.

        Raises:
            DataError: it has no list of samples, one of this name waits already, or the name is
                neither an int64 nor a str.
        """
        rollout = read_id("a rollout has the name", rollout)
        size = len(samples) if isinstance(samples, Sized) else 0
        if rollout in self._waiting or not size:
            what = "waits already" if size else "has no samples in a list"
            raise DataError(f"rollout {brief(rollout)} {what}; add each finished rollout once")
        self._waiting[rollout] = samples

    def take(self, *, allow_partial: bool = False) -> list[tuple[int | str, Sample]] | None:
        """The samples of the next step, each with its rollout's name.

        Args:
            allow_partial: take what is left, if that is less than a step: after the last rollout.

        Returns:
            Those of the rollouts that have waited longest; None if too few wait.
        """
        size = min(self.global_batch_size, len(self._waiting))
        if size < (1 if allow_partial else self.global_batch_size):
            return None
        names = [*self._waiting][:size]
        return [(name, sample) for name in names for sample in self._waiting.pop(name)]
