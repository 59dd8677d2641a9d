"""Outputs, losses and gradients that are no numbers are refused, with where they are."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from megapack.errors import ScheduleError
from megapack.non_finite import FiniteFlags, Spot, origins
from tests.job_in_process import job_of_one

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
ROWS = [(4, 1), (), tuple(range(20))]


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    with job_of_one():
        yield


def hidden(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.ones(3, 1, 2, dtype=dtype)
    values[1, 0, 1] = value
    return values


def test_numbers_pass() -> None:
    flags = FiniteFlags(stages=(0, 1))
    flags.refuse([], device=CPU)
    flags.puts_out(0, 0, hidden())
    flags.puts_out(1, 0, torch.tensor(2.5))
    flags.look_at_gradients([[torch.zeros(4), torch.ones(2)], []])
    flags.refuse(ROWS, device=CPU)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_output_is_named_with_its_samples(value: float) -> None:
    flags = FiniteFlags(stages=(0, 1))
    flags.puts_out(1, 1, hidden())
    flags.puts_out(1, 0, hidden(value))
    says = r"the output of chunk 1 of micro-batch 0 \(samples 4, 1\) holds a NaN or an infinity"
    with pytest.raises(ScheduleError, match=says):
        flags.refuse(ROWS, device=CPU)


def test_a_loss_is_called_one_and_few_samples_are_told() -> None:
    flags = FiniteFlags()
    flags.puts_out(0, 2, torch.tensor(math.nan, requires_grad=True))
    says = r"the loss of micro-batch 2 \(samples 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\) holds"
    with pytest.raises(ScheduleError, match=says):
        flags.refuse(ROWS, device=CPU)


def test_infinities_that_cancel_are_found() -> None:
    flags, values = FiniteFlags(), hidden(math.inf)
    values[0, 0, 0] = -math.inf
    flags.puts_out(0, 0, values)
    with pytest.raises(ScheduleError, match="micro-batch 0"):
        flags.refuse(ROWS, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_that_the_dtype_could_not_hold_is_fine(dtype: torch.dtype) -> None:
    flags = FiniteFlags()
    flags.puts_out(0, 0, torch.full((4096,), 60000.0, dtype=dtype))
    flags.refuse([(0,)], device=CPU)


# (replica, micro-batch or None for gradients, stage) where something is no number.
@pytest.mark.parametrize(
    ("seen", "first"),
    [
        ([(0, 0, 2), (0, 0, 1), (0, 0, 3)], {(0, 0, 1)}),
        ([(0, 0, 1), (0, 1, 2), (1, 0, 3)], {(0, 0, 1), (0, 1, 2), (1, 0, 3)}),
        ([(0, None, 0), (0, None, 1), (1, None, 2)], {(0, None, 1), (1, None, 2)}),
        ([(0, None, 3), (0, 1, 3), (1, None, 0)], {(0, 1, 3)}),
    ],
    ids=[
        "a stage that passes it on",
        "micro-batches apart",
        "backwards",
        "losses before gradients",
    ],
)
def test_what_came_first_is_to_blame(
    seen: list[tuple[int, int | None, int]], first: set[tuple[int, int | None, int]]
) -> None:
    def spot(replica: int, microbatch: int | None, stage: int) -> Spot:
        return Spot(replica, microbatch, -stage if microbatch is None else stage)

    assert origins(spot(*one) for one in seen) == {spot(*one) for one in first}


def test_gradients_are_told_where_the_outputs_are_numbers() -> None:
    flags = FiniteFlags(stages=(1, 3))
    flags.puts_out(0, 0, hidden())
    flags.look_at_gradients([[torch.zeros(4)], [torch.tensor([1.0, math.nan])]])
    with pytest.raises(ScheduleError, match="the gradients hold a NaN or an infinity, though"):
        flags.refuse(ROWS, device=CPU)
