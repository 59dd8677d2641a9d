"""slime's own step on the schedule and the planner of megapack; see tests/hosts/steps/slime.py."""

from __future__ import annotations

import itertools

import pytest

from megapack.hosts import slime
from tests.hosts.steps.job import Runs
from tests.hosts.steps.mamba import needs_mamba
from tests.hosts.steps.rollout_checks import (
    check_equal,
    check_interleaving_without_overlap_fails,
    check_own_layers_on_two_ranks,
    check_patched,
    check_planned_interleaving_without_overlap,
    check_planned_rows,
    check_recurrent_layers,
    check_rows_of_mamba_layers,
    check_shared_prefixes,
    check_tower,
    check_unpatched_exchanges,
    merged_logprobs,
    values_of,
)

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

BOTH = "slime"
PLANNER = "slime,-megatron_core"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs("slime", tmp_path_factory.mktemp("slime"), case="fanout")


@pytest.mark.parametrize("layout", ["dp=2", "cp=2", "pp=2", "pp=2,vpp=2"])
def test_the_patched_step_trains_as_one_rank_does_without_patches(runs: Runs, layout: str) -> None:
    check_patched(runs, slime, layout)


@pytest.mark.parametrize("layout", ["", "cp=2", "pp=2,vpp=2"])
def test_shared_prefixes_change_no_number(runs: Runs, layout: str) -> None:
    check_shared_prefixes(runs, layout)


def test_without_patches_stages_exchange_shapes(runs: Runs) -> None:
    check_unpatched_exchanges(runs)


def test_the_planners_patch_alone_changes_rows_and_nothing_else(runs: Runs) -> None:
    planned = runs("pp=2", PLANNER)
    check_equal(planned, runs(""))
    check_planned_rows(slime, planned, "pp=2", "fanout")
    assert planned[0].row_tokens != runs("pp=2")[0].row_tokens
    assert planned[0].num_shape_exchanges > 0


@pytest.mark.parametrize("patches", ["", PLANNER])
def test_interleaving_without_overlap_fails_on_the_hosts_schedule(runs: Runs, patches: str) -> None:
    check_interleaving_without_overlap_fails(runs, patches)


def test_interleaving_without_overlap_is_right_on_planned_shapes(runs: Runs) -> None:
    check_planned_interleaving_without_overlap(runs)


def test_a_mean_per_token_is_that_of_one_sample_at_a_time(runs: Runs) -> None:
    case = "tokens+fanout"
    check_reference(runs, "", f"{case}+reference", expected=1.0)
    check_equal(runs("pp=2", BOTH, case), runs("", "", f"{case}+reference"))


def test_a_mean_per_rollout_is_that_of_one_sample_at_a_time(runs: Runs) -> None:
    check_reference(runs, "", "fanout+removed+reference", expected=1.0)


def test_a_removed_sample_is_a_token_of_the_mean_without_the_patch(runs: Runs) -> None:
    case = "tokens+fanout+removed+reference"
    share = runs("", "", case)[0].more["removed_share"]
    assert share < 0.99
    check_reference(runs, "", case, expected=share)
    check_reference(runs, "slime_loss", case, expected=1.0)


def check_reference(runs: Runs, patches: str, case: str, *, expected: float) -> None:
    """Loss and gradient norm of the first step are this multiple of the reference's."""
    (report,) = runs("", patches, case)
    for name, reference in (("losses", "reference_loss"), ("grad_norms", "reference_grad_norm")):
        ratio = values_of([report], name)[0] / report.more[reference]
        assert ratio == pytest.approx(expected, abs=2e-6)


# Interleaved stages are left out without the patches: over gloo they are wrong in some runs.
@pytest.mark.parametrize(
    ("layout", "patches"),
    [*itertools.product(["", "dp=2", "cp=2", "pp=2"], ["", BOTH]), ("pp=2,vpp=2", BOTH)],
)
def test_images_are_those_of_one_sample_at_a_time(runs: Runs, layout: str, patches: str) -> None:
    """slime's Qwen3.5 encodes them in its rows, on its first chunk."""
    (alone,) = runs("", "", "images+reference")
    assert alone.losses[0] == pytest.approx(alone.more["reference_loss"], rel=2e-6)
    assert alone.grad_norms[0] == pytest.approx(alone.more["reference_grad_norm"], rel=2e-6)
    reports = runs(layout, patches, "images")
    check_equal(reports, [alone])
    check_tower(reports, alone.more["reference_tower_gradients"])
    if patches:
        assert all(report.num_shape_exchanges == 0 for report in reports)
    else:
        assert bool(reports[0].num_shape_exchanges) == ("pp" in layout)


@pytest.mark.parametrize("layout", ["", "pp=2"])
def test_planned_rows_count_images(runs: Runs, layout: str) -> None:
    check_planned_rows(slime, runs(layout, BOTH, "images"), layout, "images")


def test_slimes_images_need_even_samples(runs: Runs) -> None:
    with pytest.raises(AssertionError, match="must be divisible by 2 \\* CP size 1"):
        runs("", BOTH, "images+odd")


def test_a_micro_batch_without_images_breaks_an_overlapped_reduction(runs: Runs) -> None:
    check_equal(runs("", BOTH, "images+few"), runs("", "", "images+few"))
    with pytest.raises(AssertionError, match="Communication call has not been issued"):
        runs("", "", "images+few+reduce")


def test_slimes_tower_in_bf16_has_rounded_angles(runs: Runs) -> None:
    """The error of the angle of an image's row 63, in radians."""
    assert runs("", "", "images+reference")[0].more["angle_error"] > 0.1


def test_slimes_images_need_its_patch_of_megatron_under_context_parallelism(runs: Runs) -> None:
    wrong = merged_logprobs(runs("cp=2", "", "images+unpatched"))
    right = merged_logprobs(runs("", "", "images+reference"))
    assert max(abs(a - b) for a, b in zip(wrong, right, strict=True)) > 1


@needs_mamba
def test_rows_of_mamba_layers(runs: Runs) -> None:
    check_rows_of_mamba_layers(runs)


@needs_mamba
@pytest.mark.parametrize("layers", ["hybrid", "own"])
def test_shared_prefixes_of_recurrent_layers_change_no_number(runs: Runs, layers: str) -> None:
    check_recurrent_layers(runs, layers)


@needs_mamba
def test_recurrent_layers_of_slime_lose_gradients_between_context_parallel_ranks(
    runs: Runs,
) -> None:
    check_own_layers_on_two_ranks(runs)
