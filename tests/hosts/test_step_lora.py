"""Hosts' own steps with their LoRA: adapters train alike with the patches and without.

Layers are Transformer Engine's, whose Python the adapters import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts.steps.job import Report, parse_layout, run_step
from tests.marks import needs_te
from tests.te_python import VERSION

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps, needs_te]


@dataclass(frozen=True)
class Host:
    """A host's worker, and the layout on which it runs with the patches."""

    layout: str = "pp=2"
    case: str = "lora"


HOSTS = {
    "miles": Host("pp=2,vpp=2", "tokens+lora"),
    "skyrl": Host(),
    "nemo_rl": Host(),
    "areal": Host(),
    "ms_swift": Host("pp=2,vpp=2"),
    "verl": Host(),
}
needs_create_peft = pytest.mark.skipif(
    sys.version_info < (3, 12),
    reason="verl calls create_peft, which Megatron-Bridge's releases for this Python do not have",
)


def run(host: str, folder: Path, layout: str, patches: Sequence[str]) -> list[Report]:
    return run_step(
        host,
        folder / str(len(patches)),
        layout=layout,
        world=parse_layout(layout).world_size,
        patches=patches,
        case=HOSTS[host].case,
        te=VERSION,
    )


@pytest.mark.parametrize(
    "host",
    [pytest.param(name, marks=needs_create_peft if name == "verl" else ()) for name in HOSTS],
)
def test_a_patched_step_trains_adapters_as_one_rank_without_patches(
    host: str, tmp_path: Path
) -> None:
    (alone,) = run(host, tmp_path, "dp=1", ())
    reports = run(host, tmp_path, HOSTS[host].layout, (host,))
    for report in reports:
        assert report.losses == pytest.approx(alone.losses, rel=1e-5) or not report.losses
        assert report.grad_norms == pytest.approx(alone.grad_norms, rel=1e-5) or (
            not report.grad_norms
        )
        assert report.num_shape_exchanges == 0
        assert any("get_forward_backward_func" in name for name in report.patched)
    assert any(report.grad_norms for report in reports)
    gradients = [report.more["adapter_gradients"] for report in reports]
    whole = {name: norm for own in gradients for name, norm in own.items()}
    # 8 layers of 4 projections with 2 matrices each.
    assert len(whole) == 64
    assert whole == pytest.approx(alone.more["adapter_gradients"], rel=1e-4)
    assert min(whole.values()) > 1e-3
    for report in (alone, *reports):
        assert set(report.more["frozen_gradients"].values()) == {0.0}
    if host == "verl":
        reference = alone.more["reference_logprobs"]
        assert reports[-1].more["reference_logprobs"] == pytest.approx(reference, abs=1e-4)
        assert reference != pytest.approx(alone.logprobs[0], abs=1e-2)
