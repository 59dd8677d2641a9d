"""AReaL's own training step and forward passes, with and without the patches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.steps.job import Report, assert_shared, run_step

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

PATCHES = ("areal",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("areal")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Report:
    """AReaL without patches on one rank."""
    return run_step("areal", folder / "alone", layout="", world=1)[0]


def assert_like_one_rank(report: Report, alone: Report) -> None:
    assert report.grad_norms == pytest.approx(alone.grad_norms, rel=1e-5)
    for found, expected in zip(report.logprobs, alone.logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("layout", ["pp=2", "pp=2,vpp=2"])
def test_a_pipeline_without_exchanges_trains_as_one_rank(
    layout: str, folder: Path, alone: Report
) -> None:
    plain = run_step("areal", folder / f"{layout}_plain", layout=layout, world=2)
    assert plain[0].num_shape_exchanges > 0
    patched = run_step(
        "areal", folder / f"{layout}_patched", layout=layout, world=2, patches=PATCHES
    )
    for report in patched:
        assert report.num_shape_exchanges == 0
        assert_like_one_rank(report, alone)


def test_data_parallel_ranks_have_one_count(folder: Path, alone: Report) -> None:
    reports = run_step("areal", folder / "dp", layout="dp=2", world=2, patches=PATCHES)
    assert reports[0].num_microbatches == reports[1].num_microbatches
    for report in reports:
        assert report.grad_norms == pytest.approx(alone.grad_norms, rel=1e-5)


@pytest.mark.parametrize("layout", ["", "pp=2,vpp=2"])
def test_shared_prefixes_change_no_number(layout: str, folder: Path) -> None:
    plain = run_step("areal", folder / f"prompts{layout}", layout="", world=1, case="prompts")[0]
    shared = run_step(
        "areal",
        folder / f"shared{layout}",
        layout=layout,
        world=2 if layout else 1,
        patches=PATCHES,
        case="prompts_shared",
    )
    for report in shared:
        assert_like_one_rank(report, plain)
    assert_shared(shared)
