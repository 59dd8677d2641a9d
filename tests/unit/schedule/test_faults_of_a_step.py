"""NaNs and infinities are refused and located; running out of memory names the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapack import Layout, MicroBatch
from megapack.errors import ScheduleError
from megapack.model.adapters import begin_row, token_adapters
from megapack.ranks.place import Place
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch
from megapack.schedule.faults import (
    FiniteFlags,
    Spot,
    StepOutOfMemory,
    origins,
    samples_text,
)
from megapack.schedule.runner import ScheduleRunner
from tests.groups import RankOf
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


def test_out_of_memory_names_the_rows_and_what_to_set() -> None:
    batch = SampleBatch([[5, 6, 7], [8, 9]])
    rows = [
        pack_row(batch, MicroBatch((i,), n, n, n * n, n), Layout()) for i, n in enumerate((3, 2))
    ]
    place = Place()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    found = StepOutOfMemory.of(error, rows, place)
    assert isinstance(found, ScheduleError)
    assert isinstance(found, torch.OutOfMemoryError)
    rest = (
        "; set a lower max_tokens_per_gpu or micro_batch_size, model.recompute=full, or a layout "
        "with more stages"
    )
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB; the step's rows have up to 3 tokens on "
        "this GPU"
    )
    assert str(found) == text + rest
    place.enter("backward", 0, 1)
    found = StepOutOfMemory.of(error, rows, place)
    assert str(found) == f"{text}, micro-batch 1 (samples 1) has 2{rest}"


@pytest.mark.parametrize("error", [None, RuntimeError, torch.OutOfMemoryError])
def test_no_row_runs_after_a_step_whatever_its_end(error: type[Exception] | None) -> None:
    """Such a row would keep tensors alive, and give its adapters to a forward of the user's."""
    row = MicroBatch((0,), 3, 3, 9, 3)
    packed = pack_row(SampleBatch([[5, 6, 7]]), row, Layout(), adapter_ids=["a"])

    def run_schedule(*_: Any) -> None:
        begin_row(packed)
        assert token_adapters(["a"]).tolist() == [0, 0, 0]
        if error is not None:
            raise error

    runner: Any = SimpleNamespace(
        place=Place(),
        groups=SimpleNamespace(dp=RankOf(0, 1), pp=RankOf(0, 1)),
        chunks=[None],
        config=SimpleNamespace(fp16=False),
        listeners=[],
        device=CPU,
        run_schedule=run_schedule,
    )
    call: Any = SimpleNamespace(rows=lambda rank: [row], is_training=False, record_routing=False)
    try:
        ScheduleRunner.run(runner, call, [packed])
    except (RuntimeError, ScheduleError):
        assert error is not None
    with pytest.raises(ScheduleError, match="no row with adapters runs"):
        token_adapters(["a"])
