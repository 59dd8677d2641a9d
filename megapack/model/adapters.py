"""The adapter of each token of the row that runs, for layers that hold several adapters.

Megatron tells linear layers nothing about a row. So it is told here before each forward, and before
each backward, in which layers may run their forward again.
"""

from __future__ import annotations

from torch import Tensor

from megapack.errors import ScheduleError

_running: list[Tensor | None] = [None]
"""Of the row that runs; the autograd engine's threads read it too."""


def token_adapters() -> Tensor:
    """The adapter of each of this rank's tokens in the row that runs, on the row's device.

        output = linear(x) + (token_adapters() == 2)[:, None, None] * adapter(x)

    Padding counts as the sample before it, so that the tokens of an adapter are side by side. Under
    sequence parallelism each tensor-parallel rank has a part of these tokens.

    Returns:
        int64 [T]: numbers of `Plan.adapter_of`; 0 in padding micro-batches.

    Raises:
        ScheduleError: no row of a plan with `adapter_ids` runs.
    """
    if _running[0] is None:
        raise ScheduleError("no row with adapters runs; plan with build_dp_schedule(adapter_ids=)")
    return _running[0]


def begin_row(adapters_T: Tensor | None) -> None:
    """From now on a row with these adapters runs; None: one without."""
    _running[0] = adapters_T
