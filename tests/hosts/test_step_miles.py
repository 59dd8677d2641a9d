"""miles' own step on the schedule and the planner of megapack; see tests/hosts/steps/miles.py."""

from __future__ import annotations

import pytest

from megapack.hosts import miles
from tests.hosts.steps.images import BRIDGE, gradient_error
from tests.hosts.steps.job import Runs
from tests.hosts.steps.mamba import needs_mamba
from tests.hosts.steps.rollout_checks import (
    check_equal,
    check_interleaving_without_overlap_fails,
    check_patched,
    check_planned_interleaving_without_overlap,
    check_planned_rows,
    check_recurrent_layers,
    check_rows_of_mamba_layers,
    check_shared_prefixes,
    check_tower,
    check_unpatched_exchanges,
)
from tests.marks import needs_te
from tests.te_python import VERSION
from tools.hosting.sources import NoSource, installed

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

BOTH = "miles"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs("miles", tmp_path_factory.mktemp("miles"), case="fanout")


@pytest.mark.parametrize("layout", ["dp=2", "cp=2", "pp=2", "pp=2,vpp=2"])
def test_the_patched_step_trains_as_one_rank_does_without_patches(runs: Runs, layout: str) -> None:
    check_patched(runs, miles, layout)


@pytest.mark.parametrize("layout", ["", "cp=2", "pp=2,vpp=2"])
def test_shared_prefixes_change_no_number(runs: Runs, layout: str) -> None:
    check_shared_prefixes(runs, layout)


def test_without_patches_stages_exchange_shapes(runs: Runs) -> None:
    check_unpatched_exchanges(runs)


def test_interleaving_without_overlap_fails_on_the_hosts_schedule(runs: Runs) -> None:
    check_interleaving_without_overlap_fails(runs, "miles,-megatron_core")


def test_interleaving_without_overlap_is_right_on_planned_shapes(runs: Runs) -> None:
    check_planned_interleaving_without_overlap(runs)


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


@pytest.fixture(scope="module")
def runs_with_images(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    try:
        installed(BRIDGE, python="3.12")
    except NoSource as error:
        pytest.skip(str(error))
    return Runs("miles", tmp_path_factory.mktemp("miles_images"), te=VERSION)


@needs_te
@pytest.mark.parametrize(
    ("layout", "patches"),
    [("pp=2", ""), ("", BOTH), ("dp=2", BOTH), ("pp=2", BOTH), ("pp=2,vpp=2", BOTH)],
)
def test_steps_with_images_are_planned_and_those_of_one_rank(
    runs_with_images: Runs, layout: str, patches: str
) -> None:
    """Megatron-Bridge's Qwen3-VL, whose steps miles does not plan on its own."""
    (alone,) = runs_with_images("", "", "images+reference")
    reports = runs_with_images(layout, patches, "images")
    check_equal(reports, [alone])
    wanted = alone.more["tower_gradients"]
    check_tower(reports, wanted)
    # Megatron's fused cross-entropy returns gradients of logits in bf16.
    reference = alone.more["reference_tower_gradients"]
    assert max(gradient_error(wanted, reference, name) for name in wanted) < 3e-3
    if patches and "dp" not in layout:
        check_planned_rows(miles, reports, layout, "images")


@needs_mamba
def test_rows_of_mamba_layers(runs: Runs) -> None:
    check_rows_of_mamba_layers(runs)


@needs_mamba
@pytest.mark.parametrize("layers", ["hybrid", "own"])
def test_shared_prefixes_of_recurrent_layers_change_no_number(runs: Runs, layers: str) -> None:
    # Megatron's fused cross-entropy returns gradients of logits in bf16.
    check_recurrent_layers(runs, layers, rel=1e-3)
