"""slime's own step on the schedule and the planner of megapack; see tests/hosts/steps/slime.py."""

from __future__ import annotations

import pytest

from megapack.hosts import slime
from tests.hosts.steps.rollout_checks import (
    Runs,
    check_equal,
    check_planned_rows,
    values_of,
)

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

BOTH = "slime,megatron_core"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs("slime", tmp_path_factory.mktemp("slime"))


@pytest.mark.parametrize("layout", ["dp=2", "cp=2", "pp=2", "pp=2,vpp=2"])
def test_the_patched_step_trains_as_one_rank_does_without_patches(runs: Runs, layout: str) -> None:
    patched = runs(layout, BOTH)
    check_equal(patched, runs(""))
    assert all(report.num_shape_exchanges == 0 for report in patched)
    assert all(report.more["forward_exchanges"] == 0 for report in patched)
    if layout.startswith("pp"):
        check_planned_rows(slime, patched, layout, "fanout")


def test_without_patches_stages_exchange_shapes(runs: Runs) -> None:
    own = runs("pp=2")
    check_equal(own, runs(""))
    assert all(report.num_shape_exchanges > 0 for report in own)
    assert all(report.more["forward_exchanges"] > 0 for report in own)


def test_the_planners_patch_alone_changes_rows_and_nothing_else(runs: Runs) -> None:
    planned = runs("pp=2", "slime")
    check_equal(planned, runs(""))
    check_planned_rows(slime, planned, "pp=2", "fanout")
    assert planned[0].row_tokens != runs("pp=2")[0].row_tokens
    assert planned[0].num_shape_exchanges > 0


@pytest.mark.parametrize("patches", ["", "slime"])
def test_interleaving_without_overlap_fails_on_the_hosts_schedule(runs: Runs, patches: str) -> None:
    """A received tensor has the shape of another row."""
    with pytest.raises(AssertionError, match="split_with_sizes expects split_sizes to sum exactly"):
        runs("pp=2,vpp=2", patches, "fanout+nooverlap")


def test_interleaving_without_overlap_is_right_on_planned_shapes(runs: Runs) -> None:
    patched = runs("pp=2,vpp=2", BOTH, "fanout+nooverlap")
    check_equal(patched, runs(""))
    assert all(report.num_shape_exchanges == 0 for report in patched)


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
