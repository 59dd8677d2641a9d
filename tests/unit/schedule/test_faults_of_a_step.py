"""NaNs and infinities are refused and located; running out of memory ends the work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megapack import Layout
from megapack.errors import ConfigError, ScheduleError, StepOutOfMemory
from megapack.schedule.faults import (
    FiniteFlags,
    OutOfMemoryGuard,
    Spot,
    check_retry,
    origins,
    samples_text,
)
from tests.job_in_process import job_of_one

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
ROWS = [(4, 1), (), tuple(range(20))]


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    with job_of_one():
        yield


def in_row(microbatch: int) -> str:
    return samples_text(ROWS[microbatch])


def hidden(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.ones(3, 1, 2, dtype=dtype)
    values[1, 0, 1] = value
    return values


def test_finite_values_pass() -> None:
    flags = FiniteFlags(stages=(0, 1))
    flags.refuse(str, device=CPU)
    flags.on_output(0, 0, hidden())
    flags.on_output(1, 0, torch.tensor(2.5))
    flags.check_gradients([[torch.zeros(4), torch.ones(2)], []])
    flags.refuse(in_row, device=CPU)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_error_names_the_output_and_its_samples(value: float) -> None:
    flags = FiniteFlags(stages=(0, 1))
    flags.on_output(1, 1, hidden())
    flags.on_output(1, 0, hidden(value))
    message = r"the output of chunk 1 of micro-batch 0 \(samples 4, 1\) holds a NaN or an infinity"
    with pytest.raises(ScheduleError, match=message):
        flags.refuse(in_row, device=CPU)


def test_the_error_names_a_loss_and_at_most_eight_samples() -> None:
    flags = FiniteFlags()
    flags.on_output(0, 2, torch.tensor(math.nan, requires_grad=True))
    message = r"the loss of micro-batch 2 \(samples 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\) holds"
    with pytest.raises(ScheduleError, match=message):
        flags.refuse(in_row, device=CPU)


def test_infinities_of_both_signs_are_found() -> None:
    flags = FiniteFlags()
    values = hidden(math.inf)
    values[0, 0, 0] = -math.inf
    flags.on_output(0, 0, values)
    with pytest.raises(ScheduleError, match="micro-batch 0"):
        flags.refuse(in_row, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_beyond_the_range_of_the_dtype_is_fine(dtype: torch.dtype) -> None:
    flags = FiniteFlags()
    flags.on_output(0, 0, torch.full((4096,), 60000.0, dtype=dtype))
    flags.refuse(in_row, device=CPU)


# (replica, micro-batch or None for gradients, stage) where a value is not finite.
@pytest.mark.parametrize(
    ("spots", "first"),
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
def test_the_first_spot_of_each_micro_batch_is_reported(
    spots: list[tuple[int, int | None, int]], first: set[tuple[int, int | None, int]]
) -> None:
    def spot(replica: int, microbatch: int | None, stage: int) -> Spot:
        return Spot(replica, microbatch, -stage if microbatch is None else stage)

    assert origins(spot(*one) for one in spots) == {spot(*one) for one in first}


def test_ranks_that_share_a_micro_batch_have_one_origin() -> None:
    """DP rank 3 got the NaN of micro-batch 0 from rank 2, with which it shares the row."""
    begins = FiniteFlags(stages=(0, 2), replica=2, first_ranks=[2, 2])
    receives = FiniteFlags(stages=(0, 2), replica=3, first_ranks=[2, 3])
    begins.on_output(0, 0, hidden(math.nan))
    receives.on_output(1, 0, hidden(math.nan))
    receives.on_output(1, 1, hidden(math.nan))
    spots = [*begins._spots(), *receives._spots()]
    assert origins(spots) == {Spot(2, 0, 0), Spot(3, 1, 2)}


def test_the_error_names_gradients_if_outputs_are_finite() -> None:
    flags = FiniteFlags(stages=(1, 3))
    flags.on_output(0, 0, hidden())
    flags.check_gradients([[torch.zeros(4)], [torch.tensor([1.0, math.nan])]])
    with pytest.raises(ScheduleError, match="the gradients hold a NaN or an infinity, though"):
        flags.refuse(in_row, device=CPU)


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"cp": 2}, {"dp": 2, "ep": 2}])
def test_no_retry_if_ranks_communicate_inside_layers(ranks: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"communicate inside layers.*set train\.on_oom=error"):
        check_retry(Layout(**ranks), SimpleNamespace())


def test_no_retry_if_ranks_share_fp8_scales() -> None:
    config = SimpleNamespace(fp8="hybrid", fp8_recipe="delayed", tp_only_amax_red=False)
    with pytest.raises(ConfigError, match=r"fp8_recipe='delayed'.*set tp_only_amax_red=True"):
        check_retry(Layout(dp=2), config)
    check_retry(Layout(), config)
    config.tp_only_amax_red = True
    check_retry(Layout(dp=2), config)


def test_no_work_runs_after_memory_ran_out() -> None:
    memory = OutOfMemoryGuard(CPU)
    calls = []

    def work(number: int) -> int:
        calls.append(number)
        if number == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return number

    assert [memory.attempt(lambda n=n: work(n)) for n in (1, 2, 3)] == [1, None, None]
    assert calls == [1, 2]
    assert memory.agree()
    with pytest.raises(StepOutOfMemory, match=r"^CUDA out of memory.*2\.00 GiB\.$"):
        memory.raise_on_all()


def test_other_errors_are_raised() -> None:
    memory = OutOfMemoryGuard(CPU)
    with pytest.raises(ValueError, match="bad"):
        memory.attempt(lambda: int("bad"))
    assert not memory.agree()
    memory.raise_on_all()
