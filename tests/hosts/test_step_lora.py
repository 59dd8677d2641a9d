"""Hosts' own steps with their LoRA: adapters train alike with the patches and without.

Layers are Transformer Engine's, whose Python the adapters import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.hosts.steps.adapters import NUM_SLOTS, multi_lora_tree
from tests.hosts.steps.job import Report, Runs, parse_layout, run_step
from tests.marks import needs_te
from tests.te_python import VERSION
from tools.hosting.sources import NoSource

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


@pytest.fixture(scope="module")
def slots_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    if sys.version_info < (3, 12):
        pytest.skip("Megatron-Bridge's layers of several adapters need Megatron-Core 0.19")
    try:
        multi_lora_tree()
    except NoSource as error:
        pytest.skip(str(error))
    return Runs("miles", tmp_path_factory.mktemp("slots"), te=VERSION)


def slot_norms(folder: Path, world: int, names: str = "gradients{}.pt") -> dict[str, float]:
    """The norm of each adapter's gradients, of the parts that tensor-parallel ranks have."""
    squares: dict[str, float] = {}
    for rank in range(world):
        for name, gradient in torch.load(folder / names.format(rank)).items():
            squares[name] = squares.get(name, 0.0) + float(gradient.double().square().sum())
    return {name: square**0.5 for name, square in squares.items()}


@pytest.mark.parametrize(
    ("layout", "case", "against"),
    [
        ("dp=2", "lora+slots", "dp=1"),
        ("dp=2", "lora+slots+fanout", "dp=1"),
        ("tp=2", "lora+slots", "tp=2"),
    ],
)
def test_steps_of_several_adapters_are_planned_and_those_without_the_patch(
    slots_runs: Runs, layout: str, case: str, against: str
) -> None:
    """miles' multi-LoRA, whose steps miles does not plan on its own."""
    is_alone = against == "dp=1"
    run = (against, "", f"{case}+reference" if is_alone else case)
    alone = slots_runs(*run)[0]
    world = 1 if is_alone else 2
    own = slot_norms(slots_runs.folder(*run), world)
    assert len(own) == 64 * NUM_SLOTS
    if is_alone:
        # Megatron's fused cross-entropy returns gradients of logits in bf16.
        reference = slot_norms(slots_runs.folder(*run), 1, "reference.pt")
        assert own == pytest.approx(reference, rel=5e-3)
    reports = slots_runs(layout, "miles", case)
    norms = slot_norms(slots_runs.folder(layout, "miles", case), world)
    assert norms == pytest.approx(own, rel=2e-5)
    assert not alone.more["planned"]
    for report in reports:
        assert report.more["planned"]
        assert report.losses == pytest.approx(alone.losses, rel=1e-5) or not report.losses
        assert report.grad_norms == pytest.approx(alone.grad_norms, rel=1e-5) or (
            not report.grad_norms
        )
    assert any(report.losses for report in reports)


def test_bridges_layers_of_several_adapters_lose_gradients_under_tensor_parallelism(
    slots_runs: Runs,
) -> None:
    """Their backward leaves out two all-reduces: of what is between an adapter's matrices, and of a
    column-parallel layer's input. Forwards are right."""
    runs = [("dp=1", "", "lora+slots+reference"), ("tp=2", "", "lora+slots")]
    alone, split = (slots_runs(*run)[0] for run in runs)
    assert split.losses == pytest.approx(alone.losses, rel=1e-5)
    whole, parts = (slot_norms(slots_runs.folder(*run), k) for k, run in enumerate(runs, 1))
    last = "decoder.layers.7.mlp.linear_fc2.adapters.0.linear_out.weight"
    wrong = [name for name in whole if parts[name] != pytest.approx(whole[name], rel=1e-2)]
    assert len(wrong) > 0.9 * len(whole)
    assert not any(last in name for name in wrong)
