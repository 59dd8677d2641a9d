"""SkyRL's own Megatron worker on a CPU, with and without patches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.steps.job import Report, assert_shared, run_step
from tests.hosts.steps.mamba import needs_mamba

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

WORLD = 2
OURS = ("skyrl",)
Ranks = list[Report]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """SkyRL's own step on one rank."""
    (report,) = run_step("skyrl", tmp_path_factory.mktemp("one"), layout="dp=1", world=1)
    return report


def run(folder: Path, layout: str, patches: tuple[str, ...] = ()) -> Ranks:
    return run_step("skyrl", folder, layout=layout, world=WORLD, patches=patches)


def assert_same(ranks: Ranks, alone: Report) -> None:
    for rank in ranks:
        assert rank.losses == pytest.approx(alone.losses, abs=1e-5)
        assert rank.grad_norms == pytest.approx(alone.grad_norms, rel=1e-5)
    own = sorted(sum(row) for row in alone.logprobs)
    # Context-parallel ranks both have all samples.
    found = sorted(sum(row) for rank in ranks for row in rank.logprobs)
    copies = len(found) // len(own)
    assert found[::copies] == pytest.approx(own, abs=1e-3)


@pytest.mark.parametrize("layout", ["dp=2", "pp=2", "cp=2"])
def test_losses_gradients_and_sums_of_logprobs_are_those_without_patches(
    tmp_path: Path, alone: Report, layout: str
) -> None:
    without = run(tmp_path / "without", layout)
    patched = run(tmp_path / "with", layout, OURS)
    assert_same(without, alone)
    assert_same(patched, alone)
    assert not without[0].patched
    assert len(patched[0].patched) == 3
    assert all(rank.num_shape_exchanges == 0 for rank in patched)
    if layout == "pp=2":
        assert all(rank.num_shape_exchanges > 0 for rank in without)


def test_interleaved_stages_run_right(tmp_path: Path, alone: Report) -> None:
    """Without patches SkyRL's 5 micro-batches are refused by Megatron: 5 % 2 is 1."""
    ranks = run(tmp_path, "pp=2,vpp=2", OURS)
    assert_same(ranks, alone)
    for rank in ranks:
        assert rank.num_shape_exchanges == 0
        assert all(count % 2 == 0 for count in rank.num_microbatches)


@pytest.mark.parametrize(
    ("patches", "says"),
    [((), "remainder of M"), (("skyrl", "-megatron_core"), "split_with_sizes")],
)
def test_interleaved_stages_need_both_patches(
    tmp_path: Path, patches: tuple[str, ...], says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        run(tmp_path, "pp=2,vpp=2", patches)


@pytest.mark.parametrize("layout", ["dp=1", "pp=2,vpp=2"])
def test_shared_prefixes_change_no_number(tmp_path: Path, layout: str) -> None:
    (plain,) = run_step("skyrl", tmp_path / "plain", layout="dp=1", world=1, case="prompts")
    shared = run_step(
        "skyrl",
        tmp_path / "shared",
        layout=layout,
        world=1 if layout == "dp=1" else WORLD,
        patches=OURS,
        case="prompts_shared",
    )
    assert_same(shared, plain)
    assert_shared(shared)


@needs_mamba
@pytest.mark.parametrize("layout", ["dp=1", "dp=2"])
def test_shared_prefixes_of_recurrent_layers_change_no_number(tmp_path: Path, layout: str) -> None:
    def report(layout: str, case: str) -> Ranks:
        place, world = tmp_path / f"{layout}{case}", 2 if layout == "dp=2" else 1
        return run_step("skyrl", place, layout=layout, world=world, patches=OURS, case=case)

    shared = report(layout, "hybrid_prompts_shared")
    (plain,) = report("dp=1", "hybrid_prompts")
    assert_same(shared, plain)
    assert_shared(shared)


@needs_mamba
def test_a_row_tells_mamba_layers_its_samples(tmp_path: Path) -> None:
    """SkyRL's does since 0.4, without patches too; the patches do it for 0.3.0."""

    def run_alone(case: str, patches: tuple[str, ...]) -> Report:
        place = tmp_path / f"{case}{len(patches)}"
        return run_step(
            "skyrl", place, layout="dp=1", world=1, steps=1, case=case, patches=patches
        )[0]

    plain = run_alone("mamba", ())
    small, whole = (run_alone(case, OURS) for case in ("mamba", "mamba_whole"))
    (tells,) = {before for before, _ in plain.more["told"]}
    assert all(told == [tells, tells] for told in plain.more["told"])
    for report in (small, whole):
        assert all(told == [tells, True] for told in report.more["told"])
    assert len(whole.row_tokens[0]) == 1
    assert len(plain.row_tokens[0]) == 5
    for report in (small, plain) if tells else (small,):
        assert report.losses == pytest.approx(whole.losses, rel=1e-5)
        assert report.grad_norms == pytest.approx(whole.grad_norms, rel=1e-5)
        for row, other in zip(report.logprobs, whole.logprobs, strict=True):
            assert row == pytest.approx(other, abs=1e-5)
    if not tells:
        assert plain.grad_norms != pytest.approx(whole.grad_norms, rel=1e-3)
