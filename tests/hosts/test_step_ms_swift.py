"""ms-swift's own Megatron trainer with the patches: the same training, planned packs and shapes."""

from __future__ import annotations

import pytest

from tests.hosts.steps.job import Runs
from tests.hosts.steps.mamba import needs_mamba
from tests.hosts.steps.ms_swift import LENGTHS, NUM_PACKS, PACKING_LENGTH

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

PATCHES = "ms_swift"
LAYOUTS = ("dp=2", "pp=2", "pp=2,vpp=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs("ms_swift", tmp_path_factory.mktemp("ms_swift"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_and_evaluation_are_those_of_one_rank_without_patches(
    run: Runs, layout: str
) -> None:
    (alone,) = run("dp=1")
    assert alone.losses[1] < alone.losses[0] - 0.1
    reports = run(layout, PATCHES)
    last = [report for report in reports if report.losses]
    assert len(last) == (2 if layout == "dp=2" else 1)
    for report in last:
        assert report.losses == pytest.approx(alone.losses, rel=1e-5)
        assert report.more["eval_losses"] == pytest.approx(alone.more["eval_losses"], rel=1e-5)
    for report in reports:
        assert report.grad_norms == pytest.approx(alone.grad_norms, rel=1e-5)
        assert "swift.dataset.packing.calculate_matched_group" in report.patched


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_the_planners_packs_and_their_shapes_are_not_exchanged(
    run: Runs, layout: str
) -> None:
    reports = run(layout, PATCHES)
    assert sum(report.num_shape_exchanges for report in reports) == 0
    packs = reports[0].more["packs"]
    assert len(packs) == NUM_PACKS
    assert sum(packs) == sum(LENGTHS)
    assert max(packs) <= PACKING_LENGTH
    for step in range(2):
        replicas = reports if layout == "dp=2" else reports[:1]
        rows = [tokens for report in replicas for tokens in report.row_tokens[step]]
        assert sorted(rows) == sorted(packs)
        assert all(
            len(report.row_tokens[step]) == report.num_microbatches[step] for report in reports
        )


def test_ms_swift_alone_exchanges_shapes_and_has_less_even_packs(
    run: Runs,
) -> None:
    without = run("pp=2")
    patched = run("pp=2", PATCHES)
    assert min(report.num_shape_exchanges for report in without) > 0

    def spread(packs: list[int]) -> int:
        return max(packs) - min(packs)

    assert spread(patched[0].more["packs"]) < spread(without[0].more["packs"])


@needs_mamba
def test_a_row_tells_mamba_layers_its_samples(run: Runs) -> None:
    """ms-swift sets `total_tokens` after the description is made, where it has no effect."""
    (plain,) = run("dp=1", case="mamba")
    (same_packs,) = run("dp=1", "megatron_core", case="mamba")
    (other_packs,) = run("dp=1", PATCHES, case="mamba")
    assert all(told == [False, False] for told in plain.more["told"])
    for report in (same_packs, other_packs):
        assert all(told == [False, True] for told in report.more["told"])
    assert plain.more["packs"] == same_packs.more["packs"] != other_packs.more["packs"]
    # The loss does not depend on the packs if no state runs from one sample into the next.
    assert other_packs.losses[0] == pytest.approx(same_packs.losses[0], rel=1e-6)
    assert other_packs.grad_norms[0] == pytest.approx(same_packs.grad_norms[0], rel=1e-5)
    assert plain.losses[0] != pytest.approx(same_packs.losses[0], rel=1e-4)
