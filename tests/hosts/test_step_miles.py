"""miles' own step on the schedule and the planner of megapack; see tests/hosts/steps/miles.py."""

from __future__ import annotations

import pytest

from megapack.hosts import miles
from tests.hosts.steps.rollout_checks import Runs, check_equal, check_planned_rows

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

BOTH = "miles,megatron_core"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs("miles", tmp_path_factory.mktemp("miles"))


@pytest.mark.parametrize("layout", ["dp=2", "cp=2", "pp=2", "pp=2,vpp=2"])
def test_the_patched_step_trains_as_one_rank_does_without_patches(runs: Runs, layout: str) -> None:
    patched = runs(layout, BOTH)
    check_equal(patched, runs(""))
    assert all(report.num_shape_exchanges == 0 for report in patched)
    assert all(report.more["forward_exchanges"] == 0 for report in patched)
    if layout.startswith("pp"):
        check_planned_rows(miles, patched, layout, "fanout")


def test_without_patches_stages_exchange_shapes(runs: Runs) -> None:
    own = runs("pp=2")
    check_equal(own, runs(""))
    assert all(report.num_shape_exchanges > 0 for report in own)
    assert all(report.more["forward_exchanges"] > 0 for report in own)


def test_interleaving_without_overlap_fails_on_the_hosts_schedule(runs: Runs) -> None:
    """A received tensor has the shape of another row."""
    with pytest.raises(AssertionError, match="split_with_sizes expects split_sizes to sum exactly"):
        runs("pp=2,vpp=2", "miles", "fanout+nooverlap")


def test_interleaving_without_overlap_is_right_on_planned_shapes(runs: Runs) -> None:
    patched = runs("pp=2,vpp=2", BOTH, "fanout+nooverlap")
    check_equal(patched, runs(""))
    assert all(report.num_shape_exchanges == 0 for report in patched)


def test_a_mean_per_token_and_the_patch_for_removed_samples(runs: Runs) -> None:
    case = "tokens+fanout+removed"
    (alone,) = runs("", "miles_loss", f"{case}+reference")
    check_equal(runs("pp=2", f"{BOTH},miles_loss", case), [alone])
    assert alone.losses[0] == pytest.approx(alone.more["reference_loss"], rel=2e-6)
    (own,) = runs("", "", case)
    share = alone.more["removed_share"]
    assert share < 0.99
    assert own.losses[0] / alone.losses[0] == pytest.approx(share, abs=2e-6)


def test_advantages_are_normalized_over_context_parallel_ranks_with_the_patch(runs: Runs) -> None:
    case = "fanout+normalize"
    alone = runs("", "", case)
    patched = runs("cp=2", f"{BOTH},miles_loss", case)
    check_equal(patched, alone)
    wanted = alone[0].more["advantages"]
    assert patched[0].more["advantages"] == pytest.approx(wanted, abs=1e-4)
    own = runs("cp=2", "", case)[0].more["advantages"]
    assert max(abs(own[sample] - wanted[sample]) for sample in wanted) > 0.05
