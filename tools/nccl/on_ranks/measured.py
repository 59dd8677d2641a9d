"""What ranks that measure have in common: the model, seconds of the slowest rank, and the end.

Their operations are not noted (`recorder.unchecked`): notes take time, and the parts before have
issued the like of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megapack.job.gpt import build_model
from tests.dist.groups import end_model_parallel

T = TypeVar("T")


def with_random_weights(seed: int, build: Callable[..., Any] = build_model) -> Callable[..., Any]:
    """A function that builds a model, with Megatron's own initialization on the device.

    Initialization by parameter names takes minutes for billions of parameters. Ranks that hold the
    same parameters draw the same numbers, and so does each call.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        with mock.patch("megapack.job.gpt.build.initialize_by_name"):
            return build(*args, **kwargs)

    return run


class Together:
    """What all ranks agree on, over gloo: it takes no part in what is measured.

    Attributes:
        end: of what is measured, by `time.monotonic`.
    """

    def __init__(self, end: float) -> None:
        self.end = end
        self.group = dist.new_group(backend="gloo")

    def in_turn(self, layouts: Iterable[T]) -> Iterator[T]:
        """Each layout, with an equal share of the time that is left; then its groups end."""
        end, waiting = self.end, list(layouts)
        for number, layout in enumerate(waiting):
            now = time.monotonic()
            self.end = now + (end - now) / (len(waiting) - number)
            yield layout
            gc.collect()
            torch.cuda.empty_cache()
            end_model_parallel()

    def is_over(self) -> bool:
        """Whether any rank is past the end."""
        return bool(self.largest(float(time.monotonic() > self.end)))

    def largest(self, value: float) -> float:
        """The largest value of any rank."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def total(self, value: float) -> float:
        """The sum of all ranks' values."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds of the slowest rank; all begin together."""
        torch.cuda.synchronize()
        dist.barrier(group=self.group)
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return self.largest(time.perf_counter() - begin)

    def _reduced(self, value: float, reduction: Any) -> float:
        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, op=reduction, group=self.group)
        return float(values)
