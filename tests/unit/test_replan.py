"""What half a budget is, and where a step cannot be tried again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megapack import Layout, build_dp_schedule
from megapack.errors import ScheduleError, StepOutOfMemory
from megapack.out_of_memory import OutOfMemoryCarrier, check_retry
from megapack.replan import halved
from megapack.train_config import PlanConfig

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def test_the_budget_is_half_of_the_largest_row() -> None:
    plan = build_dp_schedule([30, 20, 40, 10], layout=Layout(), max_tokens_per_gpu=60)
    config = halved(PlanConfig(max_tokens_per_gpu=60), plan.steps)
    largest = max(mb.padded_tokens for mb in plan.steps[0].ranks[0])
    assert config.max_tokens_per_gpu == config.forward_max_tokens_per_gpu == largest // 2


def test_a_budget_far_above_the_rows_is_not_what_is_halved() -> None:
    plan = build_dp_schedule([5, 5], layout=Layout(), max_tokens_per_gpu=1_000_000)
    assert halved(PlanConfig(max_tokens_per_gpu=1_000_000), plan.steps).max_tokens_per_gpu == 5


def test_count_based_rows_have_half_the_samples() -> None:
    plan = build_dp_schedule([5] * 8, layout=Layout(), micro_batch_size=4)
    config = halved(PlanConfig(micro_batch_size=4), plan.steps)
    assert config == PlanConfig(micro_batch_size=2)


def test_a_forward_budget_beside_counts_is_halved_too() -> None:
    plan = build_dp_schedule([30, 30, 20, 40], layout=Layout(), max_tokens_per_gpu=60)
    config = halved(PlanConfig(micro_batch_size=3, forward_max_tokens_per_gpu=60), plan.steps)
    assert config == PlanConfig(micro_batch_size=1, forward_max_tokens_per_gpu=30)


def test_rows_of_one_sample_cannot_be_halved() -> None:
    plan = build_dp_schedule([50, 60], layout=Layout(), max_tokens_per_gpu=64)
    with pytest.raises(
        StepOutOfMemory, match=r"one sample, of up to 60 padded tokens; set"
    ) as told:
        halved(PlanConfig(max_tokens_per_gpu=64), plan.steps)
    assert told.value.on_all_ranks


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"cp": 2}, {"dp": 2, "ep": 2}])
def test_ranks_that_meet_inside_layers_cannot_try_again(ranks: dict[str, int]) -> None:
    with pytest.raises(ScheduleError, match=r"meet inside layers.*set train\.on_oom=error"):
        check_retry(Layout(**ranks), [], SimpleNamespace())


@pytest.mark.parametrize("name", ["overlap_grad_reduce", "overlap_param_gather"])
def test_ranks_that_meet_within_forwards_or_backwards_cannot_try_again(name: str) -> None:
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(**{name: True}))
    with pytest.raises(ScheduleError, match=f"with {name}.*set it to False"):
        check_retry(Layout(pp=2), [chunk], SimpleNamespace())


def test_ranks_that_share_fp8_scales_cannot_try_again() -> None:
    config = SimpleNamespace(fp8="hybrid", fp8_recipe="delayed", tp_only_amax_red=False)
    with pytest.raises(ScheduleError, match=r"fp8_recipe='delayed'.*set tp_only_amax_red=True"):
        check_retry(Layout(dp=2), [], config)
    check_retry(Layout(), [], config)
    config.tp_only_amax_red = True
    check_retry(Layout(dp=2), [], config)


def test_work_ends_with_the_first_failure() -> None:
    carrier, calls = OutOfMemoryCarrier(SimpleNamespace(), CPU), []

    def work(number: int) -> int:
        calls.append(number)
        if number == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return number

    assert [carrier._tried(lambda n=n: work(n)) for n in (1, 2, 3)] == [1, None, None]
    assert calls == [1, 2]
    assert carrier.agree()
    with pytest.raises(StepOutOfMemory, match=r"^CUDA out of memory.*2\.00 GiB\.$"):
        carrier.raise_on_all()


def test_other_errors_are_not_carried() -> None:
    carrier = OutOfMemoryCarrier(SimpleNamespace(), CPU)
    with pytest.raises(ValueError, match="bad"):
        carrier._tried(lambda: int("bad"))
    assert not carrier.agree()
    carrier.raise_on_all()
