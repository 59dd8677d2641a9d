"""The main job's numbers: equal bits on the same layout, equal up to rounding on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megapack.job.view.records import read_run
from tests.dist.train.test_train import TINY, metrics, order, run

pytestmark = pytest.mark.dist

# dp, pp, vpp, tp, cp, and other settings that must not change the numbers.
LAYOUTS: dict[str, tuple[tuple[int, int, int, int, int], list[str]]] = {
    "one": ((1, 1, 1, 1, 1), []),
    "cp2": ((1, 1, 1, 1, 2), ["train.trace_steps=1"]),
    "dp2_pp2_vpp2": ((2, 2, 2, 1, 1), []),
}
RATES = ("tokens_per_second", "tokens_per_second_per_gpu")


def trained(folder: Path, name: str) -> list[dict[str, Any]]:
    """The metrics of four steps on a layout."""
    (dp, pp, vpp, tp, cp), others = LAYOUTS[name]
    sizes = {"dp": dp, "pp": pp, "vpp": vpp, "tp": tp, "cp": cp}
    layout = [f"layout.{key}={size}" for key, size in sizes.items()]
    folder.mkdir()
    code, output = run(folder, *TINY, *layout, *others, world=dp * pp * tp * cp)
    assert code == 0, output[-6000:]
    return metrics(folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return trained(tmp_path_factory.mktemp("layouts") / "one", "one")


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return trained(tmp_path_factory.mktemp("layouts") / "piped", "dp2_pp2_vpp2")


@pytest.mark.parametrize("name", ["cp2", "dp2_pp2_vpp2"])
def test_losses_do_not_depend_on_the_layout(
    name: str, one: list[dict[str, Any]], piped: list[dict[str, Any]], tmp_path: Path
) -> None:
    lines = piped if name == "dp2_pp2_vpp2" else trained(tmp_path / name, name)
    assert len(lines) == 4
    for line, expected in zip(lines, one, strict=True):
        for key in ("loss", "grad_norm", "entropy_nats", "kl_old_nats", "kl_ref_nats"):
            assert line[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
    if name == "cp2":
        # Ranks that share a row write one trace.
        (traced,) = read_run(tmp_path / name / "runs/run").traced
        count = len(traced.plan.steps[0].ranks[0])
        assert order(traced.events)[0] == [
            (kind, 0, k) for k in range(count) for kind in ("F", "B")
        ]


def test_repeating_a_job_gives_the_same_bits(piped: list[dict[str, Any]], tmp_path: Path) -> None:
    first, again = (
        [
            {
                key: value
                for key, value in line.items()
                if not key.endswith("_s") and key not in RATES
            }
            for line in lines
        ]
        for lines in (piped, trained(tmp_path / "again", "dp2_pp2_vpp2"))
    )
    assert first == again
    assert len({line["loss"] for line in first}) == 4
